"""Decoding ahead: the images of step t+1 are read and decoded while step t computes."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import torch

from mmlab.data.manifest import StepManifest
from mmlab.data.pipeline import DataSource
from mmlab.data.worker import decode_pictures, end_with_parent
from mmlab.errors import DataError


class Prefetcher:
    """Decodes a rank's own images ahead, in one thread (`workers` = 0) or in that many spawned processes.

    `submit` a step's manifest as soon as it is known, `take` it when its turn comes. Results do not depend on
    `workers`. A step is known by its manifest itself, so that one of before a restore cannot be taken for one of after
    it. Steps may be taken in another thread; `close` (or a `with` block) ends its processes.
    """

    def __init__(self, source: DataSource, workers: int = 0) -> None:
        self.source = source
        self.workers = workers
        self._jobs: dict[int, tuple[StepManifest, dict[int, Future]]] = {}
        # Spawned, never forked: a fork of a process with torch's and the engine's threads can hang.
        self._executor: Executor = (
            ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), initializer=end_with_parent)
            if workers
            else ThreadPoolExecutor(1, thread_name_prefix="decode")
        )

    def submit(self, manifest: StepManifest, positions: Sequence[int]) -> None:
        """Start to decode the images of the samples at `positions` (those this rank owns). DataError as for `take`."""
        jobs: dict[int, Future] = {}
        for position in positions:
            sample = manifest.samples[position]
            if not self.workers:
                jobs[position] = self._executor.submit(self.source.decode_sample, sample)
                continue
            pictures = self.source.pictures(sample)
            path = str(self.source.shards[sample.shard])
            try:
                jobs[position] = self._executor.submit(decode_pictures, path, pictures, self.source.image_size)
            except BrokenProcessPool:
                raise self._worker_died() from None
        self._jobs[id(manifest)] = (manifest, jobs)

    def take(self, manifest: StepManifest) -> tuple[dict[int, torch.Tensor], set[int]]:
        """({position: pixels float32 [tiles, 3, S, S]}, positions with a bad picture) of a submitted step; waits.

        KeyError when the step was not submitted; DataError when a shard cannot be read or a decode process died.
        """
        _, jobs = self._jobs.pop(id(manifest))
        pixels: dict[int, torch.Tensor] = {}
        bad: set[int] = set()
        for position, job in jobs.items():
            try:
                result = job.result()
            except BrokenProcessPool:
                raise self._worker_died() from None
            sample = manifest.samples[position]
            pixels[position], is_bad = self.source.collect(sample, result) if self.workers else result
            if is_bad:
                bad.add(position)
        return pixels, bad

    def _worker_died(self) -> DataError:
        return DataError(
            f"A decode process ended abruptly (out of memory?). Set data.workers below {self.workers}, or 0."
        )

    def drop(self) -> None:
        """Forget everything submitted (after a restore); what has not begun is not decoded."""
        for _, jobs in list(self._jobs.values()):
            for job in jobs.values():
                job.cancel()
        self._jobs.clear()

    def close(self) -> None:
        """Forget what is submitted and end the thread or processes."""
        self.drop()
        self._executor.shutdown(wait=True, cancel_futures=True)

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
