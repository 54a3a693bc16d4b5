"""A frozen encoder works ahead: the images of later steps are encoded while the pipeline is busy with this one."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from mmlab.data.manifest import StepManifest
from mmlab.plan.ops import Op

Pixels = Callable[[], Mapping[int, Tensor]]
"""Decoded images by position, of the samples that this rank owns; waits until they are decoded."""
Encode = Callable[[StepManifest, Mapping[int, Tensor], int], Tensor | None]
"""Features of the images of a step that are encoded with a microbatch; None where the rank owns none of them."""
Trace = Callable[[Op, float, float], None]
"""Told (op, start, end) of what was done; times as `time.perf_counter` gives them."""


class EncodeAhead:
    """Features of steps to come, encoded in order in a thread of its own.

    The queue is as long as what it is asked for (`parallel.encoder_ahead` steps). A step is known by its manifest
    itself, not by its number: after a restore the data makes new ones, and features of the old ones are never found.
    """

    def __init__(self, encode: Encode, trace: Trace) -> None:
        self._encode, self._trace = encode, trace
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="encode-ahead")
        self._steps: dict[int, tuple[StepManifest, dict[int, Future[Tensor | None]]]] = {}

    def ask(self, steps: Sequence[tuple[StepManifest, Pixels]], microbatches: Sequence[int]) -> None:
        """Encode these steps, each at the given (first) microbatches, unless they are queued; forget all others."""
        wanted = {id(manifest) for manifest, _ in steps}
        for key in [key for key in self._steps if key not in wanted]:
            self._forget(key)
        for manifest, pixels in steps:
            if id(manifest) not in self._steps:
                jobs = {m: self._executor.submit(self._job, manifest, pixels, m) for m in microbatches}
                self._steps[id(manifest)] = (manifest, jobs)

    def take(self, manifest: StepManifest, microbatch: int) -> Future[Tensor | None] | None:
        """The features of a step at a (first) microbatch, perhaps still being encoded; None if it was not asked for."""
        _, jobs = self._steps.get(id(manifest), (None, {}))
        return jobs.get(microbatch)

    @torch.no_grad()
    def _job(self, manifest: StepManifest, pixels: Pixels, microbatch: int) -> Tensor | None:
        images = pixels()
        start = time.perf_counter()
        features = self._encode(manifest, images, microbatch)
        self._trace(Op("encode_ahead", microbatch), start, time.perf_counter())
        return features

    def _forget(self, key: int) -> None:
        _, jobs = self._steps.pop(key)
        for job in jobs.values():
            job.cancel()

    def close(self) -> None:
        """Forget everything and end the thread, once it is through with what it does right now."""
        for key in list(self._steps):
            self._forget(key)
        self._executor.shutdown(wait=True, cancel_futures=True)
