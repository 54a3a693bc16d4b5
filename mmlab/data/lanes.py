"""Lanes: the order of samples, a pure function of the data set, the number of lanes and the seed.

Each epoch every sample comes once. Shards are cut into chunks of neighbouring samples (so that reading stays local),
chunks are shuffled and dealt to a fixed number of lanes, samples are shuffled inside their chunk, and the lanes take
turns. All shuffling is by a hash keyed with (seed, epoch, ...): the same on every machine and version of numpy, and
independent of ranks and workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mmlab.data.manifest import Cursors

_MASK = (1 << 64) - 1


@dataclass(frozen=True)
class LaneItem:
    """One sample in the order: where it lies, and the epoch and lane it came in."""

    shard: int
    index: int
    epoch: int
    lane: int


def splitmix64(values: np.ndarray) -> np.ndarray:
    """SplitMix64's output function on uint64 (Steele, Lea and Flood 2014): a good, fixed 64-bit mix."""
    with np.errstate(over="ignore"):
        z = values + np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def keyed_order(n: int, *key: int) -> np.ndarray:
    """A permutation of 0..n-1 that depends on `key` (integers) alone; int64 [n]."""
    state = np.zeros(1, dtype=np.uint64)
    for part in key:
        state = splitmix64(state ^ np.uint64(part & _MASK))
    return np.argsort(splitmix64(splitmix64(np.arange(n, dtype=np.uint64)) ^ state), kind="stable")


@dataclass(frozen=True)
class _Epoch:
    """One epoch's deal: the chunks of each lane in order, and how many samples the lane has gone through after each."""

    chunks: list[np.ndarray]
    ends: list[np.ndarray]

    def length(self, lane: int) -> int:
        """Samples of a lane."""
        return int(self.ends[lane][-1]) if len(self.ends[lane]) else 0


class Lanes:
    """The infinite order of samples over shards with `sizes` samples each."""

    def __init__(self, sizes: Sequence[int], lanes: int, seed: int) -> None:
        if lanes < 1 or not any(sizes):
            raise ValueError("lanes need at least one lane and one sample")
        self.sizes = tuple(sizes)
        self.lanes = lanes
        self.seed = seed
        # Four chunks a lane keep lanes of a small set even; 256 neighbours keep reading local in a large one.
        self.chunk = max(1, min(256, sum(sizes) // (4 * lanes)))
        self._chunks = [
            (shard, start, min(self.chunk, size - start))
            for shard, size in enumerate(sizes)
            for start in range(0, size, self.chunk)
        ]
        self._epochs: dict[int, _Epoch] = {}
        self._orders: dict[tuple[int, int], np.ndarray] = {}

    def start(self) -> Cursors:
        """The cursors before the first sample."""
        return Cursors(0, (0,) * self.lanes, 0)

    def take(self, cursors: Cursors, n: int) -> tuple[list[LaneItem], Cursors]:
        """The next `n` samples and the cursors after them. Pure: the same cursors give the same samples."""
        if len(cursors.positions) != self.lanes:
            raise ValueError(f"cursors of {len(cursors.positions)} lanes, but there are {self.lanes}")
        epoch, positions, lane = cursors.epoch, list(cursors.positions), cursors.lane
        items: list[LaneItem] = []
        while len(items) < n:
            deal = self._deal(epoch)
            turns = [(lane + k) % self.lanes for k in range(self.lanes)]
            lane = next((t for t in turns if positions[t] < deal.length(t)), -1)
            if lane < 0:
                epoch, positions, lane = epoch + 1, [0] * self.lanes, 0
                continue
            items.append(self._item(deal, epoch, lane, positions[lane]))
            positions[lane] += 1
            lane = (lane + 1) % self.lanes
        return items, Cursors(epoch, tuple(positions), lane)

    def _deal(self, epoch: int) -> _Epoch:
        """Shuffle the chunks and give each to the lane with the fewest samples so far."""
        if epoch not in self._epochs:
            lengths = [0] * self.lanes
            chunks: list[list[int]] = [[] for _ in range(self.lanes)]
            for chunk in keyed_order(len(self._chunks), self.seed, epoch).tolist():
                lane = lengths.index(min(lengths))
                chunks[lane].append(chunk)
                lengths[lane] += self._chunks[chunk][2]
            ends = [np.cumsum([self._chunks[c][2] for c in lane_chunks]) for lane_chunks in chunks]
            _keep_few(self._epochs, 2)
            self._epochs[epoch] = _Epoch([np.array(c, dtype=np.int64) for c in chunks], ends)
        return self._epochs[epoch]

    def _item(self, deal: _Epoch, epoch: int, lane: int, position: int) -> LaneItem:
        place = int(np.searchsorted(deal.ends[lane], position, side="right"))
        chunk = int(deal.chunks[lane][place])
        shard, start, size = self._chunks[chunk]
        if (epoch, chunk) not in self._orders:
            _keep_few(self._orders, 4 * self.lanes)
            self._orders[epoch, chunk] = keyed_order(size, self.seed, epoch, chunk + 1)
        within = position - (int(deal.ends[lane][place]) - size)
        return LaneItem(shard, start + int(self._orders[epoch, chunk][within]), epoch, lane)


def _keep_few(cache: dict, most: int) -> None:
    """Drop the oldest entries so that one more makes at most `most`."""
    while len(cache) >= most:
        del cache[next(iter(cache))]
