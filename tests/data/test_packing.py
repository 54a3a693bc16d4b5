"""Captioned pictures into shards: every kind of source, what is refused, and packs that were broken off."""

import csv
import hashlib
import io
import json
import os
import sys

import pytest
from data_helpers import conversation_json, encode, picture, small_plan
from pack_helpers import captions_file, names, packed_json, photos
from PIL import Image

from mmlab.cli import run_command
from mmlab.data.packing import PackOptions, pack
from mmlab.data.pipeline import DataSource
from mmlab.data.tiling import Tiling
from mmlab.data.tokenizer import train_tokenizer
from mmlab.errors import DataError

__all__ = ["photos"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MMLAB_DATA", str(tmp_path / "cache"))


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


def test_resized_for_tiles_a_picture_is_cut_as_it_would_have_been(tmp_path):
    (tmp_path / "in").mkdir()
    sizes = [(640, 200), (300, 900), (500, 500), (90, 70), (1000, 333), (61, 400)]
    for number, size in enumerate(sizes):
        (tmp_path / "in" / f"{number}.jpg").write_bytes(encode(gradient(size), format="JPEG"))
        (tmp_path / "in" / f"{number}.txt").write_text("x")
    pack(tmp_path / "in", tmp_path / "out", PackOptions(resize=32, tiles=6))
    tiling = Tiling(32, 4, 1000, max_tiles=6)
    for size, (_, members) in zip(sizes, packed_json(tmp_path / "out"), strict=True):
        packed = Image.open(io.BytesIO(members["jpg"])).size
        grid = tiling.grid(*size)
        assert tiling.grid(*packed) == grid
        assert packed == size or min(packed[0] - 32 * grid.columns, packed[1] - 32 * grid.rows) == 0


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
