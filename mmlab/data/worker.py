"""What runs in a decode process. Imports no torch, so that a spawned process is ready in a fraction of a second."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path

from mmlab.data.decode import Decoded, decode
from mmlab.data.shards import ShardFiles
from mmlab.data.tiling import Picture


def end_with_parent() -> None:
    """Make this process end when its parent does, even by kill -9 (a pool's process would wait for ever)."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch(sentinel: int = parent.sentinel) -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def decode_pictures(shard: str, pictures: Sequence[Picture], size: int) -> list[Decoded]:
    """Read and decode pictures of a shard. Opening it each time costs microseconds."""
    files = ShardFiles([Path(shard)])
    try:
        return [decode(files.read(0, p.offset, p.size), size, p.grid) for p in pictures]
    finally:
        files.close()
