import gzip
import io
import json
import multiprocessing
import os
import tarfile

import pytest
from data_functions import open_and_list
from data_helpers import conversation_json, numbered_shards, picture, small_plan, write_tar
from PIL import Image
from webdataset import ShardWriter
from webdataset.tariterators import group_by_keys, tar_file_expander

from mmlab.data.index import build_index, open_index
from mmlab.data.manifest import Split
from mmlab.data.pipeline import DataSource
from mmlab.data.shards import ShardFiles, expand_shards, scan_shard
from mmlab.data.tokenizer import TextTokenizer, train_tokenizer
from mmlab.errors import DataError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MMLAB_DATA", str(tmp_path / "cache"))


@pytest.fixture
def tokenizer(tmp_path):
    path = tmp_path / "tok" / "tokenizer.json"
    path.parent.mkdir()
    path.write_bytes(train_tokenizer(["a red apple", "what is this?"], 300))
    return TextTokenizer(path)


def test_folder_brace_pattern_and_glob_name_the_same_shards(tmp_path):
    folder = numbered_shards(tmp_path / "set", shards=3)
    expected = [folder / f"train-{i:06d}.tar" for i in range(3)]
    assert expand_shards(str(folder)) == expected
    assert expand_shards(str(folder / "train-{000000..000002}.tar")) == expected
    assert expand_shards(str(folder / "train-{000000,000002}.tar")) == [expected[0], expected[2]]
    assert expand_shards(str(folder / "train-*.tar")) == expected


@pytest.mark.parametrize("pattern", ["nowhere", "set/train-{000000..000009}.tar", "set/x*.tar", "set/{a", "empty"])
def test_missing_shards_name_the_field(tmp_path, monkeypatch, pattern):
    monkeypatch.chdir(tmp_path)
    numbered_shards(tmp_path / "set")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"data\.path = "):
        expand_shards(pattern)


def test_index_holds_places_sizes_and_lengths(tmp_path, tokenizer):
    image = picture(size=(37, 11))
    wide = picture(size=(300, 20), format="JPEG")
    path = write_tar(
        tmp_path / "a.tar",
        [
            ("x/1.png", image),
            ("x/1.txt", b"a red apple"),
            ("x/2.0.jpg", wide),
            ("x/2.1.png", image),
            ("x/2.json", conversation_json(("<image> and <image>", "what"), ("is?", "this"))),
            ("x/3.txt", b"text alone"),
            ("__meta__/info", b"not a sample"),
        ],
    )
    index = build_index(path, tokenizer)
    assert index.keys == ("x/1", "x/2", "x/3")
    assert index.images_of(0)[0, 2:].tolist() == [37, 11]
    assert index.images_of(1)[:, 2:].tolist() == [[300, 20], [37, 11]]
    assert len(index.images_of(2)) == 0
    offset, size = index.images_of(0)[0, :2].tolist()
    assert path.read_bytes()[offset : offset + size] == image
    apple = len(tokenizer.encode("a red apple")) + 1
    assert index.segments_of(0) == [1, 0, -apple]
    assert index.segments_of(1)[:2] == [1, 0]
    assert index.segments_of(1).count(0) == 2
    assert index.segments_of(2) == [1, -(len(tokenizer.encode("text alone")) + 1)]


def test_index_is_stored_and_made_anew_when_the_shard_or_tokenizer_changes(tmp_path, tokenizer):
    path = write_tar(tmp_path / "a.tar", [("1.txt", b"one"), ("2.txt", b"two")])
    first = open_index(path, tokenizer)
    stored = list(tmp_path.glob("a.tar.*.index.npz"))
    assert len(stored) == 1
    before = stored[0].stat().st_mtime_ns
    assert open_index(path, tokenizer).keys == first.keys
    assert stored[0].stat().st_mtime_ns == before
    write_tar(path, [("1.txt", b"one"), ("2.txt", b"two"), ("3.txt", b"three")])
    assert open_index(path, tokenizer).keys == ("1", "2", "3")
    stored[0].write_bytes(b"damaged")
    assert open_index(path, tokenizer).keys == ("1", "2", "3")


def test_index_goes_to_the_cache_when_the_folder_is_read_only(tmp_path, tokenizer, monkeypatch):
    path = write_tar(tmp_path / "ro" / "a.tar", [("1.txt", b"one")])
    monkeypatch.setattr("tempfile.mkstemp", _refuse_in(path.parent))
    assert open_index(path, tokenizer).keys == ("1",)
    assert not list(path.parent.glob("*.npz"))
    assert len(list((tmp_path / "cache").rglob("*.npz"))) == 1


def _refuse_in(folder):
    """mkstemp as it behaves in a read-only folder (root may write anywhere, so permissions would not do)."""
    import tempfile

    real = tempfile.mkstemp

    def mkstemp(prefix=None, dir=None):
        if str(dir) == str(folder):
            raise PermissionError(13, "Permission denied")
        return real(prefix=prefix, dir=dir)

    return mkstemp


def test_several_processes_index_at_once(tmp_path, tokenizer):
    path = write_tar(tmp_path / "a.tar", [(f"{i}.txt", b"some text") for i in range(300)])
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        results = pool.starmap(open_and_list, [(path, tokenizer.path)] * 4, chunksize=1)
        pool.close()
        pool.join()
    assert all(keys == tuple(str(i) for i in range(300)) for keys in results)
    assert len(list(tmp_path.glob("*.npz"))) == 1
    assert not [name for name in os.listdir(tmp_path) if name.endswith((".tmp", ".lock"))]


# -- damaged shards


def test_truncated_tar_names_the_file_and_the_last_whole_sample(tmp_path):
    path = numbered_shards(tmp_path, shards=1) / "train-000000.tar"
    whole = path.read_bytes()
    starts = [sample.images[0].offset for sample in scan_shard(path)]
    for cut in (starts[3] + 10, starts[3] - 600, starts[3] - 512):  # in a picture, in a text, between two members
        path.write_bytes(whole[:cut])
        with pytest.raises(
            DataError, match=r"train-000000\.tar: is cut short .* the last whole sample is \"00000[12]\""
        ):
            scan_shard(path)


def test_tar_without_its_end_mark_is_refused(tmp_path):
    path = numbered_shards(tmp_path, shards=1) / "train-000000.tar"
    path.write_bytes(path.read_bytes().rstrip(b"\0"))
    with pytest.raises(DataError, match="is cut short"):
        scan_shard(path)


def test_other_broken_shards(tmp_path):
    empty = write_tar(tmp_path / "empty.tar", [])
    with pytest.raises(DataError, match=r"empty\.tar: no samples"):
        scan_shard(empty)
    strange = write_tar(tmp_path / "strange.tar", [("readme.md", b"x")])
    with pytest.raises(DataError, match=r"strange\.tar: no samples"):
        scan_shard(strange)
    (tmp_path / "text.tar").write_bytes(b"hello" * 500)
    with pytest.raises(DataError, match=r"text\.tar: is no tar file"):
        scan_shard(tmp_path / "text.tar")
    (tmp_path / "nothing.tar").write_bytes(b"")
    with pytest.raises(DataError, match=r"nothing\.tar: is no tar file"):
        scan_shard(tmp_path / "nothing.tar")
    (tmp_path / "z.tar").write_bytes(
        gzip.compress(numbered_shards(tmp_path / "s", 1).joinpath("train-000000.tar").read_bytes())
    )
    with pytest.raises(DataError, match=r"z\.tar: is compressed"):
        scan_shard(tmp_path / "z.tar")


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([("1.png", picture())], r'sample "1": no caption'),
        ([("1.png", picture()), ("1.json", b'{"width": 3}')], r'sample "1": no caption'),
        ([("1.png", picture()), ("1.json", b"{")], r'sample "1": its json cannot be read'),
        ([("1.png", picture()), ("1.json", b"[" * 100_000)], r'sample "1": its json cannot be read'),
        ([("1.png", picture()), ("1.txt", b"\xff\xfe")], r'sample "1": its txt is not UTF-8'),
        ([("1.txt", b"  ")], r'sample "1": the text is empty'),
        ([("1.json", conversation_json(("<image> what?", "that")))], r"1 <image> marks but 0 pictures"),
        ([("1.json", b'{"conversations": [{"from": "human", "value": "hi"}]}')], r"has no answer"),
        ([("1.json", b'{"conversations": [{"from": "cat", "value": "hi"}]}')], r"is not a list of"),
        ([("1.json", b'{"conversations": "hi"}')], r"is not a list of"),
    ],
)
def test_samples_without_usable_text_are_named(tmp_path, tokenizer, files, message):
    path = write_tar(tmp_path / "a.tar", files)
    with pytest.raises(DataError, match=message):
        build_index(path, tokenizer)


# -- shards that others wrote


def test_shards_written_by_webdataset_work(tmp_path):
    image = Image.new("RGB", (20, 20), (10, 200, 10))
    with ShardWriter(str(tmp_path / "set-%03d.tar"), maxcount=2, verbose=0) as writer:
        for i, extension in enumerate(("jpg", "png", "webp", "jpeg")):
            writer.write({"__key__": f"s{i}", extension: _encoded(image, extension), "txt": f"green number {i}"})
        writer.write({"__key__": "s4", "json": {"conversations": [{"from": "gpt", "value": "text alone"}]}})
        turns = [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "Green."}]
        writer.write({"__key__": "s5", "jpg": _encoded(image, "jpg"), "json": {"id": 5, "conversations": turns}})
    source = DataSource(small_plan(tmp_path / "set-{000..002}.tar", data={"global_batch": 6}))
    manifest, _ = source.manifest(1, source.start(), Split())
    assert {s.key.partition("/")[2]: s.tiles for s in manifest.samples} == {f"s{i}": int(i != 4) for i in range(6)}
    pixels, bad = source.pixels(manifest, range(6))
    assert not bad
    assert pixels.shape == (5, 3, 32, 32)
    assert (pixels[:, 1] > 0.5).all()
    assert (pixels[:, 0] < -0.5).all()
    items = {s.key[-2:]: source.item(s) for s in manifest.samples}
    assert (items["s5"]["prompt"], items["s5"]["truth"]) == ("What?", "Green.")
    assert (items["s1"]["prompt"], items["s1"]["truth"]) == ("", "green number 1")
    assert items["s4"]["image"] is None
    assert Image.open(io.BytesIO(items["s1"]["image"])).size == (20, 20)
    source.close()


def _encoded(image, extension):
    buffer = io.BytesIO()
    image.save(buffer, format={"jpg": "JPEG", "jpeg": "JPEG"}.get(extension, extension))
    return buffer.getvalue()


def test_json_captions_and_img2dataset_pairs(tmp_path, tokenizer):
    path = write_tar(
        tmp_path / "a.tar",
        [
            ("1.jpg", picture(format="JPEG")),
            ("1.json", json.dumps({"caption": "from the json", "width": 1}).encode()),
            ("2.jpg", picture(format="JPEG")),
            ("2.json", json.dumps({"caption": "from the json"}).encode()),
            ("2.txt", b"from the txt, longer"),
        ],
    )
    index = build_index(path, tokenizer)
    assert index.texts[:, 0].tolist() == [1, 0]
    assert index.segments_of(1)[-1] == -(len(tokenizer.encode("from the txt, longer")) + 1)


def test_webdataset_reads_what_we_write(tmp_path):
    from mmlab.data.datasets import make

    folder = make("shapes", tmp_path / "shapes", samples=20)
    # Its WebDataset class reads through the same two stages, but leaves closing the file to the garbage collector.
    with open(folder / "train-000000.tar", "rb") as stream:
        read = list(group_by_keys(tar_file_expander([{"url": "train-000000.tar", "stream": stream}])))
    assert len(read) == 20
    assert [sample["__key__"] for sample in read] == [sample.key for sample in scan_shard(folder / "train-000000.tar")]
    assert all(Image.open(io.BytesIO(sample["png"])).size == (96, 96) for sample in read)
    assert all(json.loads(sample["json"])["conversations"] for sample in read)


def test_a_pax_name_and_a_dot_folder_are_fine(tmp_path):
    path = tmp_path / "p.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as tar:
        for name in ("./" + "long" * 60 + "/1.txt", "./" + "long" * 60 + "/._1.txt"):
            info = tarfile.TarInfo(name)
            info.size = 3
            tar.addfile(info, io.BytesIO(b"abc"))
    (sample,) = scan_shard(path)
    member = sample.texts["txt"]
    assert path.read_bytes()[member.offset : member.offset + member.size] == b"abc"


def test_more_shards_than_files_may_be_open(tmp_path, monkeypatch):
    folder = numbered_shards(tmp_path, shards=5, samples=1)
    paths = expand_shards(str(folder))
    monkeypatch.setattr(ShardFiles, "MOST_OPEN", 2)
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else None
    files = ShardFiles(paths)
    for _ in range(2):
        for shard, path in enumerate(paths):
            assert files.read(shard, 0, 100) == path.read_bytes()[:100]
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) == before + 2
    files.close()
    with pytest.raises(DataError, match="became shorter"):
        files.read(0, paths[0].stat().st_size - 10, 20)
    files.close()
    paths[0].unlink()
    with pytest.raises(DataError, match="cannot be read"):
        files.read(0, 0, 1)


def test_members_of_a_sample_need_not_be_neighbours(tmp_path):
    """`tar -cf shard.tar folder` stores files in any order; what comes again under its key is another sample."""
    path = tmp_path / "train-000000.tar"
    with tarfile.open(path, "w") as tar:
        for name in ("./b.txt", "./a.txt", "./a.jpg", "./b.jpg", "./a.txt", "./a.jpg"):
            entry = tarfile.TarInfo(name)
            entry.size = 4
            tar.addfile(entry, io.BytesIO(b"data"))
    samples = scan_shard(path)
    assert [sample.key.removeprefix("./") for sample in samples] == ["b", "a", "a"]
    assert all(len(sample.images) == 1 and "txt" in sample.texts for sample in samples)
    assert samples[1].texts["txt"].offset < samples[2].texts["txt"].offset
