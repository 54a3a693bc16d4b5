"""What the next step consumes, on this rank: manifests in order, text of its microbatches, pixels it owns."""

from __future__ import annotations

import torch
import torch.distributed as dist

from mmlab.data.manifest import Cursors, StepManifest
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


class Feed:
    """Batches of one rank, one step decoded ahead.

    `cursors` is the data position after the last consumed step (what a checkpoint stores); prefetched samples do not
    count as consumed.
    """

    def __init__(self, plan: Plan, mesh: Mesh, source: DataSource) -> None:
        self.plan, self.mesh, self.source = plan, mesh, source
        self.owner = mesh.place.vision
        self.prefetcher = Prefetcher(source, plan.data.workers) if mesh.place.vision >= 0 else None
        self.images_seen = 0
        self.images_bad = 0
        self.cursors = source.start()
        self._pixels: dict[int, torch.Tensor] = {}
        self._next: tuple[StepManifest, Cursors] | None = None
        self._current: tuple[StepManifest, Cursors, frozenset[int]] | None = None

    def reset(self, cursors: Cursors, step: int) -> None:
        """Stand after step `step`; the next batch is that of `step + 1`. All ranks together."""
        self.cursors = cursors
        if self.prefetcher is not None:
            self.prefetcher.drop()
        self._submit(cursors, step + 1)
        self.agree(self._reduce_bad(self.next_bad()))

    def _submit(self, cursors: Cursors, step: int) -> None:
        self._next = self.source.manifest(step, cursors)
        if self.prefetcher is not None:
            manifest, _ = self._next
            self.prefetcher.submit(manifest, manifest.owned(self.owner))

    def next_bad(self) -> frozenset[int]:
        """Undecodable images of the next step that this rank owns; waits for their decoding."""
        assert self._next is not None
        if self.prefetcher is None:
            return frozenset()
        self._pixels, bad = self.prefetcher.take(self._next[0])
        return frozenset(bad)

    def _reduce_bad(self, mine: frozenset[int]) -> frozenset[int]:
        flags = torch.zeros(self.plan.data.global_batch, dtype=torch.float64)
        for position in mine:
            flags[position] = 1.0
        if self.mesh.control is not None:
            dist.all_reduce(flags, group=self.mesh.control)
        return frozenset(flags.nonzero().flatten().tolist())

    def agree(self, bad: frozenset[int]) -> None:
        """Take the next step as the current one; `bad` are its undecodable images as all ranks know them."""
        assert self._next is not None
        manifest, cursors = self._next
        self._current = (manifest, cursors, bad)

    def batch(self) -> StepInput:
        """The current step's batch; starts decoding the one after it. DataError when too many images are bad."""
        assert self._current is not None
        manifest, after, bad = self._current
        self.images_seen += sum(1 for sample in manifest.samples if sample.tiles)
        self.images_bad += len(bad)
        self._judge(manifest, bad)
        pixels = {} if self.prefetcher is None else self._pixels
        batch = StepInput(manifest, bad, self._texts(manifest, bad), pixels)
        self.cursors = after
        self._submit(after, manifest.step + 1)
        return batch

    def _texts(self, manifest: StepManifest, bad: frozenset[int]) -> dict[int, PackedText]:
        place = self.mesh.place
        if place.role != "language":
            return {}
        texts = {}
        for m in range(self.plan.parallel.microbatches):
            text = self.source.text(manifest, manifest.microbatch(place.dp, m), bad)
            texts[m] = share(text, self.plan.model, self.mesh.cp).to(self.mesh.device)
        return texts

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
