"""What tests run in spawned processes: its imports are few, so that they start fast."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from mmlab.data.cache import make_folder_once
from mmlab.data.datasets.shapes import build
from mmlab.data.index import open_index
from mmlab.data.tokenizer import TextTokenizer


def open_and_list(shard: Path, tokenizer: Path) -> tuple[str, ...]:
    """Keys of a shard's index."""
    return open_index(shard, TextTokenizer(tokenizer)).keys


def make_shapes_once(folder: Path) -> int:
    """Inode of a small set that several processes make."""
    return make_folder_once(folder, partial(build, samples=200)).stat().st_ino


def read_remote(path, size, block):
    """All of a remote shard, in pieces as small as samples, with blocks of that many bytes."""
    from mmlab.data.remote import RemoteShard, blocks

    blocks.BLOCK = block
    shard = RemoteShard(path)
    return b"".join(shard.read(at, 500) for at in range(0, size, 500))
