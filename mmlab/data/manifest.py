"""The step manifest: what a step consumes and who owns it, computed alike on every rank without reading pixels.

The global batch (which samples, in which order) depends on the data set, the seed and the cursors alone. Only the
`Split` (which replica and microbatch computes a sample, which encoder owns its images) depends on the layout.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mmlab.data.tiling import Grid
from mmlab.plan.schema import Plan


@dataclass(frozen=True)
class ManifestSample:
    """One sample of a step: where it lies and how long it is."""

    key: str
    """Name, unique over the data set: "<shard file>/<sample key>"."""
    shard: int
    """Position of its shard in the data source's list."""
    index: int
    """Position in its shard."""
    epoch: int
    """Pass over the data set, from 0."""
    lane: int
    """The lane it came from."""
    length: int
    """Input tokens, image tokens included."""
    targets: int
    """Target tokens."""
    grids: tuple[Grid, ...]
    """How each of its images is tiled; empty for text only."""

    @property
    def tiles(self) -> int:
        """Tiles of all its images; 0 for text only."""
        return sum(grid.tiles for grid in self.grids)


@dataclass(frozen=True)
class Split:
    """How a global batch is divided: `dp` replicas, `microbatches` on each, `owners` ranks that encode images.

    Where owners are ranks of the replicas, `stride` of them in a row belong to one replica, the next to the next, and
    round again; 0 where they belong to none. `local`: no image leaves its replica. `together`: microbatches whose
    images are encoded at once; owners are balanced over these.
    """

    dp: int = 1
    microbatches: int = 1
    owners: int = 1
    stride: int = 0
    local: bool = False
    together: int = 1

    @classmethod
    def of(cls, plan: Plan) -> Split:
        """The plan's: encoder ranks, those of each replica's first stage, or all ranks own images."""
        p = plan.parallel
        grid, stride = p.dp * p.cp * p.tp, p.cp * p.tp
        owners = {"own_ranks": p.vision_dp, "first_stage": grid, "all_ranks": grid * p.pp}[p.vision]
        stride = 0 if p.vision == "own_ranks" else stride
        return cls(p.dp, p.microbatches, owners, stride, p.vision == "first_stage", p.encoder_batch)

    def one_replica(self) -> Split:
        """The same owners for a batch that replica 0 computes alone, as one microbatch."""
        return Split(1, 1, self.stride if self.local else self.owners, self.stride, self.local)

    def belongs(self, owner: int, dp: int) -> bool:
        """Whether an owner is one of a replica's own ranks."""
        return self.stride > 0 and owner // self.stride % self.dp == dp

    def owners_of(self, dp: int) -> list[int]:
        """Owners among which the images of a replica are divided."""
        return [owner for owner in range(self.owners) if not self.local or self.belongs(owner, dp)]


@dataclass(frozen=True)
class Cursors:
    """Where one source stands. `positions`: samples taken from each lane in this epoch; `lane`: whose turn it is."""

    epoch: int
    positions: tuple[int, ...]
    lane: int = 0

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {"epoch": self.epoch, "positions": list(self.positions), "lane": self.lane}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Cursors:
        """From what `to_json` gave (after a round trip through a file)."""
        return cls(int(value["epoch"]), tuple(int(p) for p in value["positions"]), int(value["lane"]))


@dataclass(frozen=True)
class StepManifest:
    """What step `step` consumes: the global batch in its order, and how `split` divides it.

    A position is an index into `samples`; it names a sample of the step everywhere (bad sets, pixels, owners).
    Microbatch m of replica d holds positions (m * dp + d) * size ... + size, so microbatch m of all replicas is a
    contiguous piece of the batch, and microbatches in order are the batch in order.
    """

    step: int
    samples: tuple[ManifestSample, ...]
    split: Split

    @property
    def microbatch_size(self) -> int:
        """Samples of one microbatch on one replica."""
        return len(self.samples) // (self.split.dp * self.split.microbatches)

    def microbatch(self, dp: int, m: int) -> tuple[int, ...]:
        """Positions of microbatch m on replica dp, in order."""
        size = self.microbatch_size
        start = (m * self.split.dp + dp) * size
        return tuple(range(start, start + size))

    def microbatch_of(self, position: int) -> tuple[int, int]:
        """(replica, microbatch) that computes a sample's text: the inverse of `microbatch`."""
        m, dp = divmod(position // self.microbatch_size, self.split.dp)
        return dp, m

    @cached_property
    def _owners(self) -> tuple[int, ...]:
        """Owner of each position, -1 without images. Greedy, largest first (Graham 1969, longest processing time):
        the least loaded of the microbatches encoded together, then of the step, then one of the sample's own replica.
        Replicas take turns, so that with equal images each encodes its own."""
        split = self.split
        owners = [-1] * len(self.samples)
        step_load = [0] * split.owners
        among = [split.owners_of(dp) for dp in range(split.dp)]
        span = self.microbatch_size * split.dp * split.together
        for start in range(0, len(self.samples), span):
            load = [0] * split.owners
            with_images = [i for i in range(start, min(start + span, len(owners))) if self.samples[i].tiles]
            for i in sorted(with_images, key=self._turn):
                dp, _ = self.microbatch_of(i)
                owner = min(among[dp], key=lambda o: (load[o], step_load[o], not split.belongs(o, dp), o))
                owners[i] = owner
                load[owner] += self.samples[i].tiles
                step_load[owner] += self.samples[i].tiles
        return tuple(owners)

    def _turn(self, position: int) -> tuple[int, int, int, int]:
        """Sorts positions into the order in which they get owners."""
        dp, m = self.microbatch_of(position)
        return -self.samples[position].tiles, m, position % self.microbatch_size, dp

    def owner(self, position: int) -> int:
        """Which of the `split.owners` encoders decodes and encodes this sample's images; -1 if it has none."""
        return self._owners[position]

    def owned(self, owner: int, m: int | None = None) -> tuple[int, ...]:
        """Positions whose images an encoder owns, in order: of microbatch m of all replicas, or of the whole step."""
        span = self.microbatch_size * self.split.dp
        span_of = range(len(self.samples)) if m is None else range(m * span, (m + 1) * span)
        return tuple(i for i in span_of if self._owners[i] == owner)

    def targets(self, bad: Collection[int] = frozenset()) -> int:
        """Target tokens of the step when the samples at the `bad` positions are masked."""
        return sum(sample.targets for i, sample in enumerate(self.samples) if i not in bad)

    @property
    def tokens(self) -> int:
        """Input tokens of the step, image tokens included."""
        return sum(sample.length for sample in self.samples)

    @property
    def tiles(self) -> int:
        """Images (tiles) of the step."""
        return sum(sample.tiles for sample in self.samples)

    def places(self) -> list[list[int]]:
        """[shard, position in it, epoch] of each sample, in order: a line of the ledger."""
        return [[sample.shard, sample.index, sample.epoch] for sample in self.samples]
