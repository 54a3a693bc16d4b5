"""What the next step consumes, on this rank: manifests in order, text of its microbatches, pixels it owns."""

from __future__ import annotations

import itertools
import threading
from collections import deque

import torch
import torch.distributed as dist

from mmlab.data.manifest import StepManifest
from mmlab.data.order import Position
from mmlab.data.packed import PackedText
from mmlab.data.pipeline import DataSource
from mmlab.data.prefetch import Prefetcher
from mmlab.errors import DataError
from mmlab.models.attention import share
from mmlab.parallel.mesh import Mesh
from mmlab.plan.schema import Plan
from mmlab.train.step import StepInput

SEEN_BEFORE_JUDGED = 100
"""Images seen before the share of undecodable ones may stop a run."""


class Coming:
    """A step that is not consumed yet: its manifest, the data position after it, and its images on their way.

    Asked by the thread that trains and by the one that encodes ahead.
    """

    def __init__(self, manifest: StepManifest, after: Position, prefetcher: Prefetcher | None) -> None:
        self.manifest, self.after = manifest, after
        self._prefetcher = prefetcher
        self._lock = threading.Lock()
        self._decoded: tuple[dict[int, torch.Tensor], set[int]] | None = None

    def _take(self) -> tuple[dict[int, torch.Tensor], set[int]]:
        with self._lock:
            if self._decoded is None:
                self._decoded = ({}, set()) if self._prefetcher is None else self._prefetcher.take(self.manifest)
            return self._decoded

    def pixels(self) -> dict[int, torch.Tensor]:
        """Images of the samples that this rank owns, by position; waits for their decoding."""
        return self._take()[0]

    def decoded(self) -> bool:
        """Whether its images are decoded. Asked by the thread that trains."""
        if self._prefetcher is None:
            return True
        if not self._lock.acquire(blocking=False):
            return False  # the other thread waits for them
        try:
            return self._decoded is not None or self._prefetcher.done(self.manifest)
        finally:
            self._lock.release()

    def bad(self) -> frozenset[int]:
        """Positions that this rank owns with an undecodable image; waits for their decoding."""
        return frozenset(self._take()[1])


def own_texts(
    plan: Plan, mesh: Mesh, source: DataSource, manifest: StepManifest, bad: frozenset[int] = frozenset()
) -> dict[int, PackedText]:
    """What this rank computes of each microbatch's text, on its device; targets of `bad` samples are masked. Empty on
    ranks without a stage."""
    if mesh.place.role != "language":
        return {}
    return {
        m: share(source.text(manifest, manifest.microbatch(mesh.place.dp, m), bad), plan.model, mesh.cp).to(mesh.device)
        for m in range(plan.parallel.microbatches)
    }


class Feed:
    """Batches of one rank, decoded `data.prefetch` steps ahead of what is encoded, which may be ahead of what is
    consumed. No more than that many are held, decoded or not.

    `cursors` is the data position after the last consumed step (what a checkpoint stores); prefetched samples do not
    count as consumed.
    """

    def __init__(self, plan: Plan, mesh: Mesh, source: DataSource) -> None:
        self.plan, self.mesh, self.source = plan, mesh, source
        self.owner = mesh.place.vision
        self.prefetcher = Prefetcher(source, plan.data.workers, plan.data.backend) if mesh.place.vision >= 0 else None
        self.ahead = plan.parallel.encoder_ahead if self.prefetcher is not None else 0
        self.depth = self.ahead + plan.data.prefetch if self.prefetcher is not None else 1
        self.images_seen = 0
        self.images_bad = 0
        self.cursors = source.start()
        self._coming: deque[Coming] = deque()
        self._current: tuple[Coming, frozenset[int]] | None = None

    def reset(self, cursors: Position, step: int) -> None:
        """Stand after step `step`; the next batch is that of `step + 1`. All ranks together."""
        self.cursors = cursors
        self._coming.clear()
        if self.prefetcher is not None:
            self.prefetcher.drop()
        self._look_ahead(cursors, step)
        self.agree(self._reduce_bad(self.next_bad()))

    def _look_ahead(self, cursors: Position, step: int) -> None:
        """Make the manifests after a step that are wanted by now, and start to decode their images."""
        while len(self._coming) < self.depth:
            if self._coming:
                cursors, step = self._coming[-1].after, self._coming[-1].manifest.step
            manifest, after = self.source.manifest(step + 1, cursors)
            if self.prefetcher is not None:
                self.prefetcher.submit(manifest, manifest.owned(self.owner))
            self._coming.append(Coming(manifest, after, self.prefetcher))

    def queued(self) -> int:
        """Steps to come whose images are decoded, in a row from the next one on; -1 where none are decoded."""
        if self.prefetcher is None:
            return -1
        return sum(1 for _ in itertools.takewhile(Coming.decoded, self._coming))

    def next_bad(self) -> frozenset[int]:
        """Undecodable images of the next step that this rank owns; waits for their decoding."""
        return self._coming[0].bad()

    def _reduce_bad(self, mine: frozenset[int]) -> frozenset[int]:
        flags = torch.zeros(self.plan.data.global_batch, dtype=torch.float64)
        for position in mine:
            flags[position] = 1.0
        if self.mesh.control is not None:
            dist.all_reduce(flags, group=self.mesh.control)
        return frozenset(flags.nonzero().flatten().tolist())

    def agree(self, bad: frozenset[int]) -> None:
        """Take the next step as the current one; `bad` are its undecodable images as all ranks know them."""
        self._current = (self._coming.popleft(), bad)

    def batch(self) -> StepInput:
        """The current step's batch; starts decoding one more. DataError when too many images are bad."""
        assert self._current is not None
        current, bad = self._current
        manifest = current.manifest
        self.images_seen += sum(1 for sample in manifest.samples if sample.tiles)
        self.images_bad += len(bad)
        self._judge(manifest, bad)
        self.cursors = current.after
        self._look_ahead(current.after, manifest.step)
        coming = [(step.manifest, step.pixels) for step in self._coming][: self.ahead]
        texts = own_texts(self.plan, self.mesh, self.source, manifest, bad)
        return StepInput(manifest, bad, texts, current.pixels(), coming)

    def _judge(self, manifest: StepManifest, bad: frozenset[int]) -> None:
        limit = self.plan.data.max_bad_share
        if bad and self.images_seen >= SEEN_BEFORE_JUDGED and self.images_bad > limit * self.images_seen:
            names = ", ".join(manifest.samples[position].key for position in sorted(bad))
            raise DataError(
                f"{self.images_bad} of {self.images_seen} images could not be decoded, more than data.max_bad_share = "
                f"{limit:g} allows; the last: {names}. Repair the shards, or raise data.max_bad_share."
            )

    def close(self) -> None:
        """End the decoding workers."""
        if self.prefetcher is not None:
            self.prefetcher.close()
