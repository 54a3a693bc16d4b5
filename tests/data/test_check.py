"""`mmlab data check`: whole shards pass, and each kind of damage is named by shard, key and member."""

import json

import pytest
from data_helpers import conversation_json, encode, numbered_shards, picture, write_tar
from PIL import Image
from remote_server import serving

from mmlab.cli import run_command
from mmlab.data.check import Bad, check
from mmlab.data.packing import PackOptions, pack
from mmlab.errors import DataError


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MMLAB_DATA", str(tmp_path / "cache"))


@pytest.fixture
def packed(tmp_path):
    """Ten JPEGs in five shards with a manifest."""
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(10):
        noise = Image.effect_noise((64, 64), 10 + number)
        (folder / f"{number}.jpg").write_bytes(encode(noise, format="JPEG"))
        (folder / f"{number}.txt").write_text(f"noise {number}")
    pack(folder, tmp_path / "packed", PackOptions(samples_per_shard=2))
    return tmp_path / "packed"


def flip(path, at):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 0xFF
    path.write_bytes(raw)


def test_a_pack_is_whole(packed, tmp_path, monkeypatch):
    found = check(str(packed))
    assert (found.shards, found.samples, found.pictures, found.manifest, found.bad) == (5, 10, 10, 5, [])
    assert found.bytes == sum(path.stat().st_size for path in packed.glob("*.tar"))
    (packed / "manifest.json").unlink()
    found = check(f"{packed}/train-{{000000..000003}}.tar")
    assert (found.shards, found.samples, found.manifest, found.bad) == (4, 8, 0, [])


def test_a_flipped_bit_is_caught_by_the_checksum(packed):
    shard = packed / "train-000002.tar"
    flip(shard, 512 + 300)  # inside of the first picture, which may well decode all the same
    (bad, *more) = check(str(packed)).bad
    assert (bad.shard, bad.key, bad.reason) == (
        str(shard),
        "",
        "its SHA-256 is not the manifest's: it was changed or damaged",
    )
    assert all(one.key == "000000004" for one in more)
    assert check(str(packed), quick=True).bad == []


def test_shards_that_are_missing_short_or_replaced_are_named(packed):
    (packed / "train-000004.tar").unlink()
    with pytest.raises(DataError, match=r"PATH = .*train-000004\.tar does not exist"):
        check(str(packed))
    (packed / "dataset.json").unlink()  # then the folder is what it holds, and the manifest what it should hold
    cut = packed / "train-000000.tar"
    cut.write_bytes(cut.read_bytes()[:3000])
    other = packed / "train-000001.tar"
    other.write_bytes((packed / "train-000002.tar").read_bytes()[:-1024] + bytes(5120))
    (packed / "train-000003.tar").write_bytes(b"")
    found = {bad.shard.rpartition("/")[2]: bad.reason for bad in check(str(packed), quick=True).bad}
    assert found["train-000004.tar"] == "is in the manifest but not there"
    assert "is cut short or damaged" in found["train-000000.tar"]
    assert "bytes and 2 samples, not" in found["train-000001.tar"]
    assert "is no tar file" in found["train-000003.tar"]


def test_bad_members_are_named_without_a_manifest(tmp_path):
    whole = encode(Image.effect_noise((64, 64), 40), format="JPEG")
    shard = write_tar(tmp_path / "set" / "a.tar", [
        ("good.jpg", whole), ("good.txt", b"fine"),
        ("cut.jpg", whole[: len(whole) // 2]), ("cut.txt", b"half a picture"),
        ("none.png", b"no picture"), ("none.txt", b"x"),
        ("two.1.jpg", whole), ("two.2.jpg", b""), ("two.json", conversation_json(("<image><image>", "x"))),
        ("marks.jpg", whole), ("marks.json", conversation_json(("<image><image>", "x"))),
        ("mute.jpg", whole),
        ("broken.jpg", whole), ("broken.json", b"{"),
        ("latin.jpg", whole), ("latin.txt", b"caf\xe9"),
        ("text.txt", b"alone"),
    ])  # fmt: skip
    found = check(str(tmp_path / "set"))
    assert (found.samples, found.pictures) == (9, 9)
    assert [(bad.shard, bad.key, bad.member) for bad in found.bad] == [
        (str(shard), "cut", "jpg"), (str(shard), "none", "png"), (str(shard), "two", "2.jpg"),
        (str(shard), "marks", "json"), (str(shard), "mute", "txt"), (str(shard), "broken", "json"),
        (str(shard), "latin", "txt"),
    ]  # fmt: skip
    reasons = [bad.reason for bad in found.bad]
    assert reasons[0].startswith("cannot be decoded (OSError: image file is truncated")
    assert reasons[3].startswith("2 <image> marks but 1 pictures")
    assert reasons[6].startswith("its txt is not UTF-8")
    assert str(found.bad[0]) == f"{shard}: cut.jpg: {reasons[0]}"
    quick = {bad.key: bad.reason for bad in check(str(tmp_path / "set"), quick=True).bad}
    assert quick["none"] == "its header is of no picture"
    assert "cut" not in quick


def test_the_command_names_what_is_bad_and_exits_with_1(packed, tmp_path, capfd):
    arguments = ["data", "check", str(packed), "--json", str(tmp_path / "out.json"), "--workers", "0"]
    assert run_command(arguments) == 0
    said = capfd.readouterr().out
    assert "5 shards, 10 samples, 10 pictures" in said
    assert "checksums of 5 compared" in said
    assert "no bad member" in said
    assert json.loads((tmp_path / "out.json").read_bytes())["ok"] is True
    numbered_shards(tmp_path / "bad", shards=1, samples=30)
    shard = tmp_path / "bad" / "train-000000.tar"
    content = [(f"{n:03d}.{e}", data) for n in range(30) for e, data in (("png", picture()[:50]), ("txt", b"x"))]
    write_tar(shard, content)
    assert run_command(["data", "check", str(shard), "--json", str(tmp_path / "out.json"), "--workers", "0"]) == 1
    out, err = capfd.readouterr()
    assert f"{shard}: 000.png: cannot be decoded" in out
    assert "and 10 more" in out
    assert "30 bad members or shards, in 1 shards" in err
    results = json.loads((tmp_path / "out.json").read_bytes())
    assert (results["ok"], len(results["bad"]), results["bad"][29]["key"]) == (False, 30, "029")
    assert run_command(["data", "check", str(tmp_path / "nowhere")]) == 1
    assert "nothing" in (err := capfd.readouterr().err) or "does not exist" in err
    assert "PATH" in err


@pytest.mark.slow
def test_remote_shards_are_checked_against_the_manifest_beside_them(packed, tmp_path):
    pytest.importorskip("aiohttp")
    with serving(packed) as site:
        found = check(site.url)
        assert (found.shards, found.samples, found.manifest, found.bad) == (5, 10, 5, [])
        flip(packed / "train-000001.tar", 812)
    with serving(packed) as site:
        bad = check(f"{site.url}/train-{{000000..000001}}.tar").bad[0]
        assert bad == Bad(f"{site.url}/train-000001.tar", "", "", bad.reason)
        assert "SHA-256" in bad.reason


@pytest.mark.slow
def test_processes_find_the_same(packed, tmp_path):
    flip(packed / "train-000002.tar", 812)
    flip(packed / "train-000004.tar", 3)
    here, there = check(str(packed)), check(str(packed), workers=3)
    assert here == there
    assert len({bad.shard for bad in here.bad}) == 2
