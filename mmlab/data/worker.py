"""What runs in a decode process. Imports no torch, so that a spawned process is ready in a fraction of a second."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mmlab.data.decode import decode_into
from mmlab.data.shards import ShardFiles
from mmlab.data.tiling import Grid


def end_with_parent() -> None:
    """Make this process end when its parent does, even by kill -9 (a pool's process would wait for ever)."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch(sentinel: int = parent.sentinel) -> None:
        wait([sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class Job(NamedTuple):
    """A picture to decode: where it lies, how it is tiled, and the place of its first tile in the batch."""

    shard: Path
    offset: int
    size: int
    grid: Grid
    first: int


def decode_jobs(tiles: np.ndarray, jobs: Sequence[Job]) -> list[str]:
    """Read and decode pictures into a batch, uint8 [tiles, 3, S, S]; the reason for each, "" where it came out.

    Opening a shard each time costs microseconds. DataError when a shard cannot be read.
    """
    files = ShardFiles(list(dict.fromkeys(job.shard for job in jobs)))
    numbers = {path: number for number, path in enumerate(files.paths)}
    try:
        files.prepare((numbers[job.shard], job.offset, job.size) for job in jobs)
        return [
            decode_into(
                tiles[job.first : job.first + job.grid.tiles],
                files.read(numbers[job.shard], job.offset, job.size),
                job.grid,
            )
            for job in jobs
        ]
    finally:
        files.close()


def decode_shared(path: str, size: int, jobs: Sequence[Job]) -> list[str]:
    """`decode_jobs` of neighbours in a batch to tiles of `size`, written to where they lie in a file in memory."""
    start, count = jobs[0].first, sum(job.grid.tiles for job in jobs)
    tiles = np.empty((count, 3, size, size), dtype=np.uint8)
    reasons = decode_jobs(tiles, [job._replace(first=job.first - start) for job in jobs])
    with open(path, "r+b") as file:
        file.seek(start * 3 * size * size)
        file.write(tiles.data)
    return reasons
