"""Pictures of a batch decoded in the background, into one buffer."""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Protocol

import numpy as np

from mmlab.data.tiling import Picture
from mmlab.data.worker import Job, decode_jobs, decode_shared, end_with_parent
from mmlab.errors import DataError

CHUNK = 8
"""Most pictures that a decode process takes at once: to hand over costs 0.1 ms, a picture 0.4 ms or more."""


class Batch:
    """Pictures on their way into one buffer, uint8 [tiles, 3, S, S]; each job decodes some of them, in order."""

    def __init__(self, tiles: np.ndarray) -> None:
        self.tiles = tiles
        self.jobs: list[Future[list[str]]] = []

    def done(self) -> bool:
        """Whether all pictures are decoded."""
        return all(job.done() for job in self.jobs)

    def result(self) -> tuple[np.ndarray, list[str]]:
        """(the buffer, why each picture could not be decoded, "" where it could); waits.

        DataError when a shard cannot be read or a decode process died.
        """
        try:
            return self.tiles, [reason for job in self.jobs for reason in job.result()]
        except BrokenProcessPool:
            raise worker_died() from None

    def drop(self) -> None:
        """What has not begun is not decoded; what has goes on, into memory that is freed after it."""
        for job in self.jobs:
            job.cancel()


def worker_died() -> DataError:
    """What a run ends with when a decode process has."""
    return DataError("A decode process ended abruptly (out of memory?). Set data.workers to fewer, or to 0.")


class Decoder(Protocol):
    """Decodes batches in the background, in the order in which they are started: pictures of `shards` to tiles of
    `size` pixels a side."""

    def __init__(self, shards: Sequence[Path], size: int, workers: int = 0) -> None: ...

    def start(self, pictures: Sequence[Picture]) -> Batch:
        """Begin to decode pictures, whose tiles lie behind one another in this order. DataError as for a result."""

    def close(self) -> None:
        """Decode no more, and end what works in the background."""


class SharedFile:
    """Bytes that decode processes write under a path: on Linux a file in memory alone (memfd), which has no name that a
    kill -9 could leave behind and which /dev/shm's size (64 MB in a container) does not bound; elsewhere a temporary
    file. It is written and read, not mapped, and used again for later batches: to map new memory for each costs 0.14 ms
    a tile of 224 x 224 in page faults, this 0.02 ms."""

    def __init__(self) -> None:
        if sys.platform == "linux":
            self._descriptor = os.memfd_create("mmlab-batch")
            self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        else:
            self._descriptor, self.path = tempfile.mkstemp(prefix="mmlab-batch-")
            weakref.finalize(self, os.unlink, self.path)
        weakref.finalize(self, os.close, self._descriptor)

    def resize(self, size: int) -> None:
        """Make it at least `size` bytes long."""
        if os.fstat(self._descriptor).st_size < size:
            os.truncate(self._descriptor, size)

    def read(self, tiles: np.ndarray) -> None:
        """Fill an array from the start on."""
        with open(self._descriptor, "rb", closefd=False) as file:
            file.seek(0)
            file.readinto(tiles.data)


class SharedBatch(Batch):
    """Pictures that decode processes write into a file, which is `given_back` when none of them is to write any more:
    then it may be used for another batch."""

    def __init__(self, tiles: np.ndarray, file: SharedFile, given_back: list[SharedFile]) -> None:
        super().__init__(tiles)
        self._file, self._given_back = file, given_back

    def result(self) -> tuple[np.ndarray, list[str]]:
        """As `Batch.result`."""
        try:
            found = super().result()
            self._file.read(self.tiles)
            return found
        finally:
            self._give_back()

    def drop(self) -> None:
        """As `Batch.drop`."""
        super().drop()
        self._give_back()

    def _give_back(self) -> None:
        file, given_back, lock, left = self._file, self._given_back, threading.Lock(), len(self.jobs)

        def one_less(_: Future) -> None:
            nonlocal left
            with lock:
                left -= 1
                if not left:
                    given_back.append(file)

        for job in self.jobs:
            job.add_done_callback(one_less)


class PillowDecoder:
    """Decodes with Pillow in one thread (`workers` = 0) or in that many spawned processes, which hand pixels over in
    shared memory. Results do not depend on `workers`."""

    def __init__(self, shards: Sequence[Path], size: int, workers: int = 0) -> None:
        self.shards, self.size, self.workers = shards, size, workers
        # Spawned, never forked: a fork of a process with torch's and the engine's threads can hang.
        self._files: list[SharedFile] = []
        self._executor: Executor = (
            ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=end_with_parent)
            if workers
            else ThreadPoolExecutor(1, thread_name_prefix="decode")
        )

    def _jobs(self, pictures: Sequence[Picture]) -> list[Job]:
        jobs, first = [], 0
        for picture in pictures:
            jobs.append(Job(self.shards[picture.shard], picture.offset, picture.size, picture.grid, first))
            first += picture.grid.tiles
        return jobs

    def start(self, pictures: Sequence[Picture]) -> Batch:
        """Hands over a few pictures at once."""
        jobs = self._jobs(pictures)
        tiles = np.empty((sum(picture.grid.tiles for picture in pictures), 3, self.size, self.size), dtype=np.uint8)
        chunk = min(CHUNK, -(-len(jobs) // max(1, self.workers))) or 1
        parts = [jobs[i : i + chunk] for i in range(0, len(jobs), chunk)]
        if not self.workers or not jobs:
            batch = Batch(tiles)
            batch.jobs = [self._executor.submit(decode_jobs, tiles, part) for part in parts]
            return batch
        file = self._files.pop() if self._files else SharedFile()
        file.resize(tiles.nbytes)
        shared = SharedBatch(tiles, file, self._files)
        try:
            for part in parts:
                shared.jobs.append(self._executor.submit(decode_shared, file.path, self.size, part))
        except BrokenProcessPool:
            raise worker_died() from None
        return shared

    def close(self) -> None:
        """End the thread or processes."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._files.clear()
