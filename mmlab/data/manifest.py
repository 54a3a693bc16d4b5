"""The step manifest: what a step consumes and who owns it, computed alike on every rank without reading pixels.

The global batch (which samples, in which order) depends on the data set, the seed and the cursors alone. Only the
`Split` (which replica and microbatch computes a sample, which encoder owns its images) depends on the layout.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from mmlab.data.buckets import Work, deal_within
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

    @property
    def work(self) -> Work:
        """What it costs."""
        return Work(self.length, self.tiles)


@dataclass(frozen=True)
class Split:
    """How a global batch is divided: `dp` replicas, `microbatches` on each, `owners` ranks that encode images.

    Where owners are ranks of the replicas, `stride` of them in a row belong to one replica, the next to the next, and
    round again; 0 where they belong to none. `local`: no image leaves its replica. `together`: microbatches whose
    images are encoded at once; owners are balanced over these. `even`: samples are dealt to microbatches by their work,
    else in order; then `budget` is how many tokens a microbatch has at most where that can be (0: no limit).
    """

    dp: int = 1
    microbatches: int = 1
    owners: int = 1
    stride: int = 0
    local: bool = False
    together: int = 1
    even: bool = False
    budget: int = 0

    @classmethod
    def of(cls, plan: Plan) -> Split:
        """The plan's: encoder ranks, those of each replica's first stage, or all ranks own images."""
        p, d = plan.parallel, plan.data
        grid, stride = p.dp * p.cp * p.tp, p.cp * p.tp
        owners = {"own_ranks": p.vision_dp, "first_stage": grid, "all_ranks": grid * p.pp}[p.vision]
        stride = 0 if p.vision == "own_ranks" else stride
        even = d.bucket_window > 0 or d.token_budget > 0
        local = p.vision == "first_stage"
        return cls(p.dp, p.microbatches, owners, stride, local, p.encoder_batch, even, d.token_budget)

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
    contiguous piece of the batch, and microbatches in order are the batch in order; with an even split it holds what
    `deal_within` gives it. `unbucketed` are the samples that the step would have without a bucket window.
    """

    step: int
    samples: tuple[ManifestSample, ...]
    split: Split
    unbucketed: tuple[ManifestSample, ...] = ()

    @cached_property
    def _microbatches(self) -> tuple[tuple[int, ...], ...]:
        """Positions of microbatch m of replica d, at m * dp + d."""
        count = self.split.dp * self.split.microbatches
        if self.split.even:
            dealt = deal_within([sample.work for sample in self.samples], count, self.split.budget)
            return tuple(map(tuple, dealt))
        size = len(self.samples) // count
        return tuple(tuple(range(number * size, (number + 1) * size)) for number in range(count))

    @cached_property
    def _places(self) -> dict[int, tuple[int, int, int]]:
        """(microbatch, place in it, replica) of each position."""
        return {
            position: (number // self.split.dp, place, number % self.split.dp)
            for number, positions in enumerate(self._microbatches)
            for place, position in enumerate(positions)
        }

    def microbatch(self, dp: int, m: int) -> tuple[int, ...]:
        """Positions of microbatch m on replica dp, in order."""
        return self._microbatches[m * self.split.dp + dp]

    def microbatch_of(self, position: int) -> tuple[int, int]:
        """(replica, microbatch) that computes a sample's text: the inverse of `microbatch`."""
        m, _, dp = self._places[position]
        return dp, m

    def of_microbatches(self, microbatches: range) -> list[int]:
        """Positions of these microbatches of all replicas, by microbatch, then replica, then place."""
        dp = self.split.dp
        numbers = range(microbatches.start * dp, min(microbatches.stop, self.split.microbatches) * dp)
        return [position for number in numbers for position in self._microbatches[number]]

    @cached_property
    def _owners(self) -> tuple[int, ...]:
        """Owner of each position, -1 without images. Greedy, largest first (Graham 1969, longest processing time):
        the least loaded of the microbatches encoded together, then of the step, then one of the sample's own replica.
        Replicas take turns, so that with equal images each encodes its own."""
        split = self.split
        owners = [-1] * len(self.samples)
        step_load = [0] * split.owners
        among = [split.owners_of(dp) for dp in range(split.dp)]
        for first in range(0, split.microbatches, split.together):
            load = [0] * split.owners
            group = self.of_microbatches(range(first, first + split.together))
            with_images = [i for i in group if self.samples[i].tiles]
            for i in sorted(with_images, key=self._turn):
                dp, _ = self.microbatch_of(i)
                owner = min(among[dp], key=lambda o: (load[o], step_load[o], not split.belongs(o, dp), o))
                owners[i] = owner
                load[owner] += self.samples[i].tiles
                step_load[owner] += self.samples[i].tiles
        return tuple(owners)

    def _turn(self, position: int) -> tuple[int, int, int, int]:
        """Sorts positions into the order in which they get owners."""
        return (-self.samples[position].tiles, *self._places[position])

    def owner(self, position: int) -> int:
        """Which of the `split.owners` encoders decodes and encodes this sample's images; -1 if it has none."""
        return self._owners[position]

    def owned(self, owner: int, m: int | None = None) -> tuple[int, ...]:
        """Positions whose images an encoder owns: of microbatch m of all replicas, or of the whole step; in order of
        microbatches, then replicas."""
        span = range(self.split.microbatches) if m is None else range(m, m + 1)
        return tuple(i for i in self.of_microbatches(span) if self._owners[i] == owner)

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
