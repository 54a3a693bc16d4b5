"""Shards by HTTP and from commands: the samples of local ones, whatever the server does."""

import errno
import json
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest
from data_functions import read_remote
from data_helpers import encode, numbered_shards, picture, small_plan, write_tar
from PIL import Image
from remote_server import serving

from mmlab.data.packing import PackOptions, pack
from mmlab.data.pipeline import DataSource
from mmlab.data.remote import RemoteShard, blocks, transport
from mmlab.data.shards import ShardFiles, expand_shards
from mmlab.data.tokenizer import train_tokenizer
from mmlab.errors import DataError

pytest.importorskip("aiohttp")


@pytest.fixture(autouse=True)
def _quickly(tmp_path, monkeypatch):
    """A cache of its own; waits and blocks small enough for a test."""
    monkeypatch.setenv("MMLAB_DATA", str(tmp_path / "cache"))
    monkeypatch.setattr(transport, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(blocks, "BLOCK", 2000)
    monkeypatch.setattr("mmlab.data.remote.addresses._JUST_NOW", 0.0)


@pytest.fixture
def site(tmp_path):
    numbered_shards(tmp_path / "site" / "set", shards=3, samples=5)
    (tmp_path / "site" / "set" / "tokenizer.json").write_bytes(train_tokenizer(["picture 1"], 300))
    with serving(tmp_path / "site") as site:
        yield site


def steps(path, count=6, **data):
    """Keys, texts and pixels of the first steps."""
    source = DataSource(small_plan(path, data=data))
    position, found = source.start(), []
    for step in range(1, count + 1):
        manifest, position = source.manifest(step, position)
        pixels, bad = source.pixels(manifest, range(4))
        found.append(([s.key for s in manifest.samples], [source.turns(s)[0].answer for s in manifest.samples],
                      pixels.sum().item(), bad))  # fmt: skip
    source.close()
    return found


def pattern(site):
    return f"{site.url}/set/train-{{000000..000002}}.tar"


@pytest.mark.parametrize(("ranges", "tags"), [(True, True), (True, False), (False, True)])
def test_http_shards_are_the_local_ones(site, tmp_path, ranges, tags):
    site.ranges, site.tags = ranges, tags
    assert steps(pattern(site)) == steps(tmp_path / "site" / "set")
    asked = site.of("train-000001.tar")
    size = (tmp_path / "site" / "set" / "train-000001.tar").stat().st_size
    assert sorted(asked) == sorted({f"bytes={at}-{min(at + 2000, size) - 1}" for at in range(0, size, 2000)}
                                   if ranges else {""})  # fmt: skip
    assert site.of("tokenizer.json") == [""]
    site.asked.clear()
    assert steps(pattern(site)) == steps(tmp_path / "site" / "set")
    assert [site.of(f"train-{n:06d}.tar") for n in range(3)] == [[], [], []]


@pytest.mark.slow
def test_broken_connections_are_taken_up_where_they_broke(site, tmp_path):
    site.cut = 2
    assert steps(pattern(site)) == steps(tmp_path / "site" / "set")
    site.ranges = False
    shutil.rmtree(tmp_path / "cache")
    site.asked.clear()
    assert steps(pattern(site)) == steps(tmp_path / "site" / "set")
    assert site.of("train-000000.tar") == [""] * 3


@pytest.mark.parametrize(
    ("status", "says", "requests"),
    [(404, "does not exist on the server", 1), (403, "does not permit it", 1), (401, "Give credentials", 1),
     (400, "refuses it", 1), (503, "the server answers 503, 5 times", 5), (429, "429, 5 times", 5)],
)  # fmt: skip
def test_what_the_server_refuses_is_one_sentence_with_the_address(site, status, says, requests):
    site.status["train-000001.tar"] = status
    with pytest.raises(DataError) as caught:
        expand_shards(pattern(site))
    assert says in str(caught.value)
    assert f"data.path: {site.url}/set/train-000001.tar" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1
    assert len([1 for path, _ in site.asked if path.endswith("000001.tar")]) == requests


def test_no_server_no_name_and_no_protocol(tmp_path):
    for url, says in (
        ("http://127.0.0.1:9/a.tar", "Check the address and the network"),
        ("zip7://a/b.tar", "no protocol that fsspec knows"),
        ("gs://bucket/a.tar", "pip install gcsfs"),
        ("http://h/{a", "Write it like"),
    ):
        with pytest.raises(DataError) as caught:
            expand_shards(url)
        assert says in str(caught.value)


@pytest.mark.slow
def test_a_server_that_does_not_answer_in_time(site, monkeypatch):
    monkeypatch.setattr(transport, "NO_ANSWER", 0.1)
    monkeypatch.setattr(transport, "ATTEMPTS", 2)
    site.wait = 0.5
    with pytest.raises(DataError, match=r"train-000000\.tar: cannot be read \(.*Timeout.*2 times\)"):
        expand_shards(f"{site.url}/set/train-000000.tar")


@pytest.mark.slow
@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("tags", [True, False])
def test_a_shard_that_is_replaced_is_noticed_and_indexed_anew(site, tmp_path, ranges, tags):
    site.ranges, site.tags = ranges, tags
    folder = tmp_path / "site" / "set"
    (path, *_) = expand_shards(pattern(site))
    shard = RemoteShard(path)
    before = shard.read(0, 10)
    numbered = [(f"{n:06d}.{e}", d) for n in range(30) for e, d in (("png", picture((n, n, n))), ("txt", b"other"))]
    write_tar(folder / "train-000000.tar", numbered)
    if ranges:  # what is cached stays right; what is not is of another version
        assert shard.read(0, 10) == before
        with pytest.raises(DataError, match=r"train-000000\.tar: was changed on the server while in use"):
            shard.read(9000, 10)
    assert steps(pattern(site)) == steps(folder)


@pytest.mark.slow
def test_the_cache_is_kept_below_its_limit(site, tmp_path, monkeypatch):
    monkeypatch.setattr(blocks, "_limit", lambda: 12_000)
    monkeypatch.setattr(blocks, "_LOOK_EVERY", 0.0)
    assert steps(pattern(site)) == steps(tmp_path / "site" / "set")
    kept = sum(file.stat().st_size for file in (tmp_path / "cache" / "remote").glob("*/*.blocks/*.data"))
    assert 0 < kept <= 12_000
    assert len(site.of("train-000000.tar")) > 6  # some blocks came twice


@pytest.mark.slow
def test_cache_mb_of_the_plan_is_the_limit(site):
    steps(pattern(site), 1, cache_mb=77)
    assert blocks._limit() == 77_000_000


@pytest.mark.slow
def test_a_full_disk_costs_speed_not_the_run(site, tmp_path, monkeypatch):
    expand_shards(pattern(site))

    def full(path, fill):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(blocks, "_write", full)
    assert steps(pattern(site)) == steps(tmp_path / "site" / "set")
    site.ranges = False
    shutil.rmtree(tmp_path / "cache")
    with pytest.raises(DataError, match=r"cannot be written \(No space left on device\)\. Make room"):
        steps(pattern(site))


@pytest.mark.slow
def test_processes_share_what_one_of_them_fetched(site, tmp_path):
    site.wait = 0.02
    paths = expand_shards(pattern(site))
    size = (tmp_path / "site" / "set" / "train-000000.tar").stat().st_size
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        found = pool.starmap(read_remote, [(paths[0], size, 2000)] * 3)
    assert len({bytes(data) for data in found}) == 1
    assert found[0] == (tmp_path / "site" / "set" / "train-000000.tar").read_bytes()
    assert len(site.of("train-000000.tar")) == -(-size // 2000)


def test_a_batch_is_fetched_at_once(site):
    (path, *_) = expand_shards(pattern(site))
    files = ShardFiles([path])
    files.prepare([(0, 0, 100), (0, 4100, 10), (0, 1990, 20)])
    assert sorted(site.of("train-000000.tar")) == ["bytes=0-1999", "bytes=2000-3999", "bytes=4000-5999"]
    site.asked.clear()
    assert len(files.read(0, 1990, 20)) == 20
    assert site.asked == []


@pytest.mark.slow
def test_a_packed_folder_trains_by_its_address(site, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number}.png").write_bytes(encode(Image.new("RGB", (40, 30), (number * 20, 9, 9))))
        (folder / f"{number}.txt").write_text(f"picture {number}")
    pack(folder, tmp_path / "site" / "packed", PackOptions(held_out=0.3, samples_per_shard=4),
         tokenizer=tmp_path / "site" / "set" / "tokenizer.json")  # fmt: skip
    url = f"{site.url}/packed"
    assert steps(url) == steps(tmp_path / "site" / "packed")
    here, there = (DataSource(small_plan(path), split="held_out") for path in (tmp_path / "site" / "packed", url))
    assert len(here) == len(there) > 0
    assert there.tokenizer.path != here.tokenizer.path
    assert there.tokenizer.digest == here.tokenizer.digest


def test_pipes_are_run_once_and_their_failures_named(site, tmp_path):
    folder = tmp_path / "site" / "set"
    command = f"pipe:echo x >> {tmp_path}/runs; cat {folder}/train-{{000000..000002}}.tar"
    assert [row[1:] for row in steps(command)] == [row[1:] for row in steps(folder)]
    assert steps(command) == steps(command)
    assert (tmp_path / "runs").read_text() == "x\n" * 3
    for bad, says in (
        ("pipe:exit 3", "exit code 3 (it said nothing)"),
        ("pipe:echo went wrong >&2; false", "exit code 1 (went wrong)"),
        (f"pipe:head -c 2000 {folder}/train-000000.tar", "is cut short"),
        ("pipe:true", "is no tar file"),
        ("pipe:no-such-program", "exit code 127"),
    ):
        with pytest.raises(DataError) as caught:
            steps(bad)
        assert says in str(caught.value)
        assert bad in str(caught.value)


@pytest.mark.slow
def test_a_pipe_that_gives_other_bytes_is_noticed(site, tmp_path):
    folder = tmp_path / "site" / "set"
    (tmp_path / "now.tar").write_bytes((folder / "train-000000.tar").read_bytes())
    (path,) = expand_shards(f"pipe:cat {tmp_path}/now.tar")
    first = RemoteShard(path).read(0, 100)
    os.unlink(blocks.blocks_folder(path) / "whole.data")
    assert RemoteShard(path).read(0, 100) == first
    (tmp_path / "now.tar").write_bytes((folder / "train-000001.tar").read_bytes())
    os.unlink(blocks.blocks_folder(path) / "whole.data")
    with pytest.raises(DataError, match="was changed"):
        RemoteShard(path).read(0, 100)


@pytest.mark.slow
def test_damaged_remote_shards_are_named_by_their_address(site, tmp_path):
    file = tmp_path / "site" / "set" / "train-000002.tar"
    file.write_bytes(file.read_bytes()[:6000])
    with pytest.raises(DataError) as caught:
        steps(pattern(site))
    assert f"{site.url}/set/train-000002.tar: is cut short" in str(caught.value)
    file.write_bytes(b"<html>no such page, but 200</html>")
    with pytest.raises(DataError) as caught:
        steps(pattern(site))
    assert f"{site.url}/set/train-000002.tar: is no tar file" in str(caught.value)
    assert json.loads(Path(expand_shards(pattern(site))[2]).read_bytes())["size"] == file.stat().st_size
