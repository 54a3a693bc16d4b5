"""Shards in S3, against a server on this machine."""

import logging
import shutil
import urllib.request

import pytest
from data_helpers import numbered_shards, small_plan, write_tar

from mmlab.data.pipeline import DataSource
from mmlab.data.remote import RemoteShard, blocks, transport
from mmlab.data.shards import expand_shards
from mmlab.data.tokenizer import train_tokenizer
from mmlab.errors import DataError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # botocore and moto are not ours to mend
]


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A bucket "photos" with three shards and a tokenizer under set/."""
    server_module = pytest.importorskip("moto.server")
    s3fs = pytest.importorskip("s3fs")
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = server_module.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    reset = urllib.request.Request(f"http://127.0.0.1:{port}/moto-api/reset", method="POST")
    urllib.request.urlopen(reset).close()  # its state outlives a server
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1", "MMLAB_DATA": str(tmp_path / "cache"),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(transport, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(blocks, "BLOCK", 4000)
    monkeypatch.setattr("mmlab.data.remote.addresses._JUST_NOW", 0.0)
    s3fs.S3FileSystem.clear_instance_cache()
    folder = numbered_shards(tmp_path / "set", shards=3)
    (folder / "tokenizer.json").write_bytes(train_tokenizer(["picture 1"], 300))
    system = s3fs.S3FileSystem()
    system.mkdir("photos")
    for file in folder.iterdir():
        system.put_file(str(file), f"photos/set/{file.name}")
    yield system
    server.stop()
    s3fs.S3FileSystem.clear_instance_cache()


def steps(path):
    source = DataSource(small_plan(path))
    position, found = source.start(), []
    for step in range(1, 6):
        manifest, position = source.manifest(step, position)
        pixels, bad = source.pixels(manifest, range(4))
        found.append(([s.key for s in manifest.samples], pixels.sum().item(), bad))
    source.close()
    return found


@pytest.mark.parametrize("pattern", ["set/train-{000000..000002}.tar", "set", "set/", "set/train-*.tar"])
def test_shards_in_s3_are_the_local_ones(store, tmp_path, pattern):
    assert steps(f"s3://photos/{pattern}") == steps(tmp_path / "set")
    assert [path.name for path in expand_shards(f"s3://photos/{pattern}")] == [f"train-{n:06d}.tar" for n in range(3)]


def test_what_is_not_there_or_not_permitted_is_one_sentence(store, monkeypatch):
    for pattern, says in (
        ("s3://photos/set/train-000009.tar", "does not exist in the store"),
        ("s3://nowhere/set/train-000009.tar", "does not exist in the store"),
        ("s3://photos/none", "nothing matches s3://photos/none/*.tar"),
    ):
        with pytest.raises(DataError) as caught:
            expand_shards(pattern)
        assert says in str(caught.value)
        assert "data.path" in str(caught.value)
    import s3fs

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(DataError, match="redentials"):
        expand_shards("s3://photos/set/train-000000.tar")


def test_a_shard_that_is_replaced_is_noticed(store, tmp_path, monkeypatch):
    (path,) = expand_shards("s3://photos/set/train-000000.tar")
    shard = RemoteShard(path)
    before = shard.read(0, 10)
    write_tar(tmp_path / "new.tar", [("000000.txt", b"other text")])
    store.put_file(str(tmp_path / "new.tar"), "photos/set/train-000000.tar")
    assert shard.read(0, 10) == before
    monkeypatch.setattr(blocks, "RECHECK", 0.0)
    with pytest.raises(DataError, match=r"s3://photos/set/train-000000\.tar: was changed on the server"):
        shard.read(9000, 10)
    shutil.copy(tmp_path / "new.tar", tmp_path / "set" / "train-000000.tar")
    assert steps("s3://photos/set") == steps(tmp_path / "set")
