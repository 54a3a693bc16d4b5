"""Captioned pictures into shards: every kind of source, what is refused, and packs that were broken off."""

import csv
import hashlib
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from data_helpers import conversation_json, encode, picture, small_plan
from PIL import Image

from mmlab.cli import run_command
from mmlab.data.packing import PackOptions, pack
from mmlab.data.packing.shelf import JOURNAL, Journal, Shelf
from mmlab.data.pipeline import DataSource
from mmlab.data.tokenizer import train_tokenizer
from mmlab.errors import DataError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MMLAB_DATA", str(tmp_path / "cache"))


@pytest.fixture
def photos(tmp_path):
    """Twelve pictures a.png to l.png, all different."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(12):
        (folder / f"{chr(97 + number)}.png").write_bytes(picture((number * 20, 255 - number * 20, 9), (40, 30)))
    return folder


def names(folder):
    return [f"{chr(97 + number)}.png" for number in range(12)]


def tree(folder):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.iterdir())}


def packed_json(out, split="train"):
    """The json of each sample of a split, in order, with the names of its other members."""
    found = []
    for shard in sorted(out.glob(f"{split}-*.tar")):
        with tarfile.open(shard) as tar:
            members = {}
            for info in tar:
                key, _, extension = info.name.partition(".")
                members.setdefault(key, {})[extension] = tar.extractfile(info).read()
            found += [(json.loads(m.pop("json")), m) for m in members.values()]
    return found


def captions_file(folder, kind):
    """The same twelve captions in each form; the source to pack."""
    rows = [(name, f"picture {name[0]}") for name in names(folder)]
    if kind == "coco":
        path = folder.parent / "annotations" / "captions_photos.json"
        path.parent.mkdir()
        images = [{"id": n, "file_name": name} for n, (name, _) in enumerate(rows)]
        path.write_text(json.dumps({"images": images, "annotations": [
            {"image_id": n, "id": n, "caption": text} for n, (_, text) in enumerate(rows)]}))  # fmt: skip
    elif kind in ("llava", "jsonl"):
        entries = [
            {"id": n, "image": name, **json.loads(conversation_json(("<image>\nwhat?", text)))}
            for n, (name, text) in enumerate(rows)
        ]  # fmt: skip
        path = folder / f"chat.{'json' if kind == 'llava' else 'jsonl'}"
        path.write_text(json.dumps(entries) if kind == "llava" else "\n".join(map(json.dumps, entries)))
    elif kind in ("csv", "tsv"):
        path = folder.parent / f"rows.{kind}"
        with open(path, "w", newline="") as file:
            writer = csv.writer(file, delimiter="," if kind == "csv" else "\t")
            writer.writerows([("file_name", "caption"), *((f"photos/{name}", text) for name, text in rows)])
    elif kind == "parquet":
        parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
        path = folder / "rows.parquet"
        parquet.write_table(arrow.table({"image": [r[0] for r in rows], "text": [r[1] for r in rows]}), path)
    else:
        for name, text in rows:
            (folder / name).with_suffix(".txt").write_text(text)
        path = folder
    return path


@pytest.mark.parametrize("kind", ["coco", "llava", "jsonl", "csv", "tsv", "parquet", "folder"])
def test_each_kind_of_source_is_recognised_and_trains(photos, tmp_path, kind):
    packed = pack(captions_file(photos, kind), tmp_path / "out", PackOptions(samples_per_shard=5))
    assert [shard.samples for shard in packed.shards] == [5, 5, 2]
    assert (packed.pictures, packed.copied, packed.skipped) == (12, 12, [])
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_bytes())
    for shard in manifest["shards"]:
        raw = (tmp_path / "out" / shard["name"]).read_bytes()
        assert (len(raw), hashlib.sha256(raw).hexdigest()) == (shard["bytes"], shard["sha256"])
    assert [m["png"] for _, m in packed_json(tmp_path / "out")] == [(photos / n).read_bytes() for n in names(photos)]
    source = DataSource(small_plan(tmp_path / "out"))
    manifest, _ = source.manifest(1, source.start())
    said = {source.turns(sample)[0].answer for sample in manifest.samples}
    assert len(said) == 4
    assert said <= {f"picture {name[0]}" for name in names(photos)}
    assert source.pixels(manifest, range(4))[1] == set()
    source.close()


def test_all_captions_of_a_picture_or_the_first(photos, tmp_path):
    path = tmp_path / "c.json"
    said = [{"image_id": 7, "caption": text} for text in ("one", "two", " ", "one")]
    path.write_text(json.dumps({"images": [{"id": 7, "file_name": "a.png"}], "annotations": said}))
    everything = pack(path, tmp_path / "all", PackOptions(images=photos))
    assert [value["caption"] for value, _ in packed_json(tmp_path / "all")] == ["one", "two"]
    assert everything.skipped == [("image 7 (a.png)", "its caption is empty")]
    assert everything.duplicates == [("image 7 (a.png)", "the same pictures and text as record 1")]
    pack(path, tmp_path / "first", PackOptions(images=photos, captions="first"))
    assert [value["caption"] for value, _ in packed_json(tmp_path / "first")] == ["one"]


def test_conversations_with_several_pictures_and_with_none(photos, tmp_path):
    turns = json.loads(conversation_json(("<image><image> which?", "both"), ("why?", "so")))["conversations"]
    text = json.loads(conversation_json(("hello", "hi")))["conversations"]
    entries = [{"image": ["a.png", "b.png"], "conversations": turns}, {"id": "t", "conversations": text}]
    (photos / "c.json").write_text(json.dumps(entries))
    pack(photos / "c.json", tmp_path / "out")
    (two, pictures), (alone, none) = packed_json(tmp_path / "out")
    assert two["conversations"] == turns
    assert {name: data for name, data in pictures.items()} == {
        "0.png": (photos / "a.png").read_bytes(), "1.png": (photos / "b.png").read_bytes()}  # fmt: skip
    assert (alone["conversations"], alone["origin"], none) == (text, "entry 2, id t", {})


def test_parquet_may_hold_the_pictures_themselves(photos, tmp_path):
    parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    rows = [{"bytes": (photos / name).read_bytes(), "path": None} for name in names(photos)[:2]]
    (tmp_path / "hub").mkdir()
    for number, row in enumerate(rows):
        parquet.write_table(
            arrow.table({"image": [row], "text": [f"t{number}"]}), tmp_path / "hub" / f"{number}.parquet"
        )
    pack(tmp_path / "hub", tmp_path / "out")
    assert [(v["caption"], m["png"]) for v, m in packed_json(tmp_path / "out")] == [
        ("t0", rows[0]["bytes"]), ("t1", rows[1]["bytes"])]  # fmt: skip


def test_without_pyarrow_the_command_to_install_it_is_named(photos, tmp_path, monkeypatch):
    (photos / "x.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r'pip install "mmlab\[pack\]"'):
        pack(photos / "x.parquet", tmp_path / "out")


def gradient(size, mode="RGB"):
    image = Image.radial_gradient("L").resize(size)
    return image.convert(mode) if mode != "RGBA" else Image.merge("RGBA", (image,) * 4)


def test_larger_pictures_are_resized_never_enlarged(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    exif = Image.Exif()
    exif[274] = 6  # a quarter turn
    pictures = {
        "a.jpg": encode(gradient((640, 320)), format="JPEG"),
        "b.png": encode(gradient((300, 600), "RGBA")),
        "c.jpg": encode(gradient((640, 320)), format="JPEG", exif=exif),
        "d.jpg": encode(gradient((99, 40)), format="JPEG"),
        "e.bmp": encode(gradient((30, 20)), format="BMP"),
        "f.jpg": encode(gradient((400, 400), "CMYK"), format="JPEG"),
        "g.png": encode(Image.new("I;16", (200, 300), 40000)),
        "h.webp": encode(gradient((200, 100)), format="WEBP"),
        "i.gif": encode(gradient((201, 100)), format="GIF"),
    }
    for name, data in pictures.items():
        (folder / name).write_bytes(data)
        (folder / name).with_suffix(".txt").write_text(name)
    packed = pack(folder, tmp_path / "out", PackOptions(resize=64))
    found = {}
    for value, members in packed_json(tmp_path / "out"):
        ((extension, data),) = members.items()
        image = Image.open(io.BytesIO(data))
        found[value["caption"]] = (extension, image.format, image.mode, image.size)
    assert found == {
        "a.jpg": ("jpg", "JPEG", "RGB", (128, 64)),
        "b.png": ("png", "PNG", "RGBA", (64, 128)),
        "c.jpg": ("jpg", "JPEG", "RGB", (64, 128)),
        "d.jpg": ("jpg", "JPEG", "RGB", (99, 40)),
        "e.bmp": ("png", "PNG", "RGB", (30, 20)),
        "f.jpg": ("jpg", "JPEG", "RGB", (64, 64)),
        "g.png": ("jpg", "JPEG", "RGB", (64, 96)),
        "h.webp": ("jpg", "JPEG", "RGB", (128, 64)),
        "i.gif": ("jpg", "JPEG", "RGB", (129, 64)),
    }
    assert packed.copied == 1
    small = Image.open(io.BytesIO(packed_json(tmp_path / "out")[0][1]["jpg"]))
    exact = Image.open(io.BytesIO(pictures["a.jpg"])).resize((128, 64), Image.Resampling.BICUBIC)
    assert max(abs(a - b) for a, b in zip(small.tobytes(), exact.tobytes(), strict=True)) < 24


def test_what_cannot_be_packed_is_skipped_and_named(photos, tmp_path):
    (photos / "cut.jpg").write_bytes(encode(gradient((300, 300)), format="JPEG")[:2000])
    (photos / "text.png").write_text("no picture")
    os.mkfifo(photos / "pipe.png")
    (tmp_path / "secret.png").write_bytes(picture())
    (photos / "link.png").symlink_to(tmp_path / "secret.png")
    (photos / "loop.png").symlink_to("loop.png")
    rows = ["cut.jpg", "text.png", "pipe.png", "link.png", "loop.png", "../secret.png", str(tmp_path / "secret.png"),
            "none.png", "https://x.org/a.png", "a\0b.png", ".", "\ud800.png"]  # fmt: skip
    entries = [{"image": "a.png", "caption": "good"}, *({"image": row, "caption": "x"} for row in rows)]
    entries += [5, {"image": 5, "caption": "x"}, {"image": "a.png"}, {"image": "a.png", "caption": ""}]
    entries += [{"image": "a.png", "conversations": []}, {"conversations": [{"from": "human", "value": "hi"}]}]
    entries += [
        {"image": "a.png", "conversations": json.loads(conversation_json(("<image><image>", "x")))["conversations"]}
    ]
    entries += [{"image": "sub\\b.png", "caption": "of Windows"}, {"image": "a.png", "caption": "\ud800"}]
    (photos / "sub").mkdir()
    (photos / "sub" / "b.png").write_bytes(picture())
    (photos / "all.json").write_text(json.dumps(entries))
    packed = pack(photos / "all.json", tmp_path / "out")
    assert [value["caption"] for value, _ in packed_json(tmp_path / "out")] == ["good", "of Windows"]
    said = dict(packed.skipped)
    for row, why in zip(
        rows,
        ["cannot be decoded", "cannot be decoded", "no regular file", "outside of", "cannot be read", "outside of",
         "outside of", "does not exist", "is an address", "no name of a file", "no regular file", "no name of a file"],
        strict=True,
    ):  # fmt: skip
        assert any(row.replace("\ud800", "") in origin.replace("�", "").replace("?", "") and why in reason
                   for origin, reason in said.items()), (row, said)  # fmt: skip
    assert len(packed.skipped) == len(entries) - 2
    report = json.loads((tmp_path / "out" / "report.json").read_bytes())
    assert [(row["origin"], row["reason"]) for row in report["skipped"]] == packed.skipped
    with pytest.raises(DataError, match=r"cut\.jpg.*--strict"):
        pack(photos / "all.json", tmp_path / "strict", PackOptions(strict=True))


def test_links_out_of_the_folder_are_followed_on_demand(photos, tmp_path):
    (tmp_path / "store.png").write_bytes(picture())
    (photos / "m.png").symlink_to(tmp_path / "store.png")
    (photos / "up").symlink_to(photos)
    (photos / "m.txt").write_text("linked")
    options = {"max_skipped": 1.0}
    with pytest.raises(DataError, match="nothing to train on"):
        pack(photos, tmp_path / "no", PackOptions(**options))
    pack(photos, tmp_path / "yes", PackOptions(follow_links=True, **options))
    assert [value["caption"] for value, _ in packed_json(tmp_path / "yes")] == ["linked"]


def test_names_that_are_no_utf8_or_hold_dots(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for name in (b"caf\xe9", b"a.b.c", "日本".encode(), b"new\nline"):
        with open(os.path.join(os.fsencode(folder), name + b".png"), "wb") as file:
            file.write(picture((len(name), 1, 1)))
        with open(os.path.join(os.fsencode(folder), name + b".txt"), "wb") as file:
            file.write(b"said of " + str(len(name)).encode())
    pack(folder, tmp_path / "out")
    found = {value["caption"]: value["pictures"] for value, _ in packed_json(tmp_path / "out")}
    assert found == {
        "said of 4": ["caf�.png"], "said of 5": ["a.b.c.png"], "said of 6": ["日本.png"],
        "said of 8": ["new\nline.png"]}  # fmt: skip


def test_too_many_skipped_stop_the_pack(photos, tmp_path):
    rows = [("path", "text"), *(("a.png", f"t{n}") for n in range(90)), *(("gone.png", "x") for _ in range(20))]
    with open(photos / "rows.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    with pytest.raises(DataError, match=r"10 of the first 100 .*--max-skipped 0\.05"):
        pack(photos / "rows.csv", tmp_path / "out")
    packed = pack(photos / "rows.csv", tmp_path / "out", PackOptions(max_skipped=0.5))
    assert (packed.samples("train"), len(packed.skipped)) == (90, 20)


def test_all_that_is_said_of_a_picture_is_held_out_together(photos, tmp_path):
    rows = [("image", "caption"), *((name, f"{name} {n}") for n in range(3) for name in names(photos))]
    with open(photos / "rows.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)
    packed = pack(photos / "rows.csv", tmp_path / "out", PackOptions(held_out=0.4, samples_per_shard=7))
    sides = [{value["pictures"][0] for value, _ in packed_json(tmp_path / "out", s)} for s in ("train", "held_out")]
    assert sides[0].isdisjoint(sides[1])
    assert sides[0] | sides[1] == set(names(photos))
    assert packed.samples("train") + packed.samples("held_out") == 36
    plan = small_plan(tmp_path / "out")
    lengths = [len(DataSource(plan, split=split)) for split in ("train", "held_out")]
    assert lengths == [packed.samples("train"), packed.samples("held_out")]


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.json", '{"images": [], "annotations": []}', "none of its annotations has a caption"),
        ("a.json", '{"images": [', "no whole JSON"),
        ("a.json", '{"a": 1}\n{"a": 2}', "--format llava"),
        ("a.json", '{"a": 1}', "is not COCO's"),
        ("a.json", '[{"image": "a.png", "caption": "x"}', "no whole JSON after 1 entries"),
        ("a.json", '[{"image": "a.png" "caption"', "no whole JSON after 0 entries"),
        ("a.json", "[]", "no record made a sample"),
        ("a.json", "", "no record made a sample"),
        ("a.jsonl", b"\xff\xfe", "not UTF-8"),
        ("a.csv", "", "has: none"),
        ("a.csv", "url,caption\nx,y\n", "--image-column; it has: url, caption"),
        ("a.csv", "image,alt\nx,y\n", "--text-column; it has: image, alt"),
        ("a.csv", b"image,text\nx,caf\xe9\n", "not UTF-8"),
        ("a.csv", 'image,text\nx,"open\n', "no table"),
        ("a.parquet", "none", "cannot be read as parquet"),
        ("a.xlsx", "none", "--format: coco, llava"),
    ],
)
def test_sources_that_cannot_be_read_are_one_sentence(tmp_path, name, content, says):
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as caught:
        pack(tmp_path / name, tmp_path / "out")
    assert says in str(caught.value)
    assert name in str(caught.value)


def test_options_and_folders_that_do_not_fit_are_refused(photos, tmp_path):
    captions_file(photos, "folder")
    pack(photos, tmp_path / "done")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("")
    (tmp_path / "empty").mkdir()
    for source, out, options, says in (
        (tmp_path / "none", "o", {}, "no such file or folder"),
        (tmp_path / "empty", "o", {}, "no pictures in it"),
        (photos, "photos/out", {}, "outside of"),
        (photos, "full", {}, "is not empty"),
        (photos, "done", {"resize": 8}, "holds a finished pack"),
        (photos, "o", {"format": "zip"}, "no such format"),
        (photos, "o", {"format": "coco"}, "is a folder"),
        (photos / "a.png", "o", {}, "does not tell what it is"),
        (photos, "o", {"images": tmp_path / "none"}, "--images"),
        (photos, "o", {"captions": "last"}, "--captions last"),
        (photos, "o", {"held_out": 1.5}, "--held-out"),
    ):
        with pytest.raises(DataError) as caught:
            pack(source, tmp_path / out, PackOptions(**options))
        assert says in str(caught.value)
    assert pack(photos, tmp_path / "done").complete


class Killed(BaseException):
    """Stands for kill -9 between two instructions."""


@pytest.mark.parametrize("after", range(1, 15))
def test_a_pack_that_is_broken_off_goes_on_to_the_same_bytes(photos, tmp_path, monkeypatch, after):
    source = captions_file(photos, "csv")
    options = PackOptions(samples_per_shard=3, held_out=0.3)
    pack(source, tmp_path / "whole", options)
    left = [after]

    def dying(method):
        def act(self, *arguments):
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            return method(self, *arguments)

        return act

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "note", dying(Journal.note))
        patch.setattr(Shelf, "finish", dying(Shelf.finish))
        patch.setattr(os, "rename", dying(os.rename))
        with pytest.raises(Killed):
            pack(source, tmp_path / "out", options)
    assert not (tmp_path / "out" / "manifest.json").exists()
    if (tmp_path / "out" / JOURNAL).exists():
        with open(tmp_path / "out" / JOURNAL, "ab") as file:
            file.write(b'{"next": 99, "at"')  # a note that was cut short
        if len(Journal(tmp_path / "out").read()):
            with pytest.raises(DataError, match="unfinished pack"):
                pack(source, tmp_path / "out", PackOptions(samples_per_shard=4))
    pack(source, tmp_path / "out", options)
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def packed_within(seconds: float, *arguments) -> bool:
    """Run the command; kill -9 and False when it needs longer."""
    command = [sys.executable, "-m", "mmlab.cli", "data", "pack", *map(str, arguments)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            _, said = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.kill(process.pid, signal.SIGKILL)
            return False
        assert process.returncode == 0, said
        return True


@pytest.mark.slow
def test_killed_at_any_time_with_any_workers_it_ends_with_the_same_bytes(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    noise = os.urandom(1 << 16)
    for number in range(1200):
        pixels = bytes((byte + number) % 256 for byte in noise[number : number + 48 * 48 * 3])
        (folder / f"{number:04d}.png").write_bytes(encode(Image.frombytes("RGB", (48, 48), pixels)))
        (folder / f"{number:04d}.txt").write_text(f"noise {number}")
    options = ("--resize", 32, "--samples-per-shard", 100, "--held-out", 0.1)
    assert packed_within(60, folder, tmp_path / "whole", *options, "--workers", 0)
    kills, delay = 0, 0.6
    while not packed_within(delay, folder, tmp_path / "out", *options, "--workers", kills % 3):
        kills += 1
        delay += 0.15  # a start takes half a second: later kills fall later in the work
        assert kills < 60
    assert kills >= 2
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_the_same_command_goes_on(photos, tmp_path):
    source = captions_file(photos, "csv")
    pack(source, tmp_path / "whole", PackOptions(workers=0))
    # A limit on the size of files stands for the full disk: the write fails in the same place.
    limited = f"import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000)); sys.argv = ['mmlab', 'data', 'pack', {str(source)!r}, {str(tmp_path / 'out')!r}, '--workers', '0']; runpy.run_module('mmlab.cli', run_name='__main__')"  # noqa: E501
    done = subprocess.run([sys.executable, "-c", limited], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "cannot be written (File too large)" in done.stderr
    assert "Traceback" not in done.stderr
    assert pack(source, tmp_path / "out", PackOptions(workers=0)).samples("train") == 12
    assert tree(tmp_path / "out") == tree(tmp_path / "whole")


def test_the_command_packs_reports_and_says_how_to_train(photos, tmp_path, capfd):
    source = captions_file(photos, "tsv")
    source.write_text(source.read_text() + "photos/gone.png\tx\n")
    (tmp_path / "tok").mkdir()
    (tmp_path / "tok" / "tokenizer.json").write_bytes(train_tokenizer(["a picture"], 300))
    out = tmp_path / "out"
    arguments = [
        "data",
        "pack",
        str(source),
        str(out),
        "--workers",
        "0",
        "--tokenizer",
        str(tmp_path / "tok/tokenizer.json"),
    ]
    assert run_command(arguments) == 0
    said = capfd.readouterr().out
    assert f"{out}: 12 samples in 1 shards" in said
    assert f"1 skipped (all in {out / 'report.json'}):" in said
    assert "row 13 (photos/gone.png): photos/gone.png does not exist" in said
    assert f'data.path="{out}"' in said
    assert (out / "tokenizer.json").read_bytes() == (tmp_path / "tok" / "tokenizer.json").read_bytes()
    assert run_command(arguments) == 0
    assert "packed already" in capfd.readouterr().out
    assert run_command([*arguments, "--resize", "5"]) == 1
    assert "Name another folder" in capfd.readouterr().err


def test_two_packs_do_not_share_a_folder(photos, tmp_path):
    import fcntl

    out = tmp_path / "out"
    out.mkdir()
    handle = os.open(out, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(DataError, match="another process packs into it"):
        pack(captions_file(photos, "csv"), out)
    os.close(handle)
    assert Path(out).is_dir()
