"""The order of samples of a whole data set: lanes of each source, sources mixed by weight, shuffled within windows.

A pure function of shards, lanes, weights, window and seed (design, decision 8), so every rank computes it alike and a
position in it is all that a checkpoint needs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from mmlab.data.lanes import LaneItem, Lanes, keyed_order
from mmlab.data.manifest import Cursors

_WINDOW = 1 << 32
"""Sets the keys of windows apart from those of chunks."""


@dataclass(frozen=True)
class Position:
    """Where the data stands: the resume state. `sources`: the cursors of each source; `taken`: samples drawn from each
    so far. With a shuffle window of `window` samples both are those at the window's start, and `offset` samples of it
    are consumed. With a bucket window all of these are those at its start, and `grouped` samples of it are consumed.
    Inside a window, `settings` are what its samples depend on, by the plan's keys."""

    sources: tuple[Cursors, ...]
    taken: tuple[int, ...]
    offset: int = 0
    window: int = 0
    grouped: int = 0
    settings: tuple[tuple[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        sources = [cursors.to_json() for cursors in self.sources]
        told = {"sources": sources, "taken": list(self.taken), "offset": self.offset, "window": self.window}
        return told | {"grouped": self.grouped, "settings": dict(self.settings)}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Position:
        """From what `to_json` gave, also what it gave before there were several sources (one source's cursors)."""
        if "sources" not in value:
            return cls((Cursors.from_json(value),), (0,))  # of one source the count decides nothing
        sources = tuple(Cursors.from_json(cursors) for cursors in value["sources"])
        taken = tuple(int(n) for n in value["taken"])
        settings = tuple((key, _frozen(setting)) for key, setting in value.get("settings", {}).items())
        grouped = int(value.get("grouped", 0))
        return cls(sources, taken, int(value["offset"]), int(value["window"]), grouped, settings)


def _frozen(value: Any) -> Any:
    """A list from JSON as the tuple that the plan has."""
    return tuple(value) if isinstance(value, list) else value


class Order:
    """The infinite order of samples.

    Args:
        sizes: samples of each shard, over all sources.
        lanes: lanes of each source.
        seed: of all shuffling.
        shards: how many shards each source has; empty means one source.
        weights: share of the samples that comes from each source, to any scale; empty means by size.
        window: samples of the mixed order that are shuffled among each other; 0 means none.

    A source that is used up begins its next epoch, whatever the others do. After n samples each source has given its
    share of n to within one sample or, with three or more sources, two. Shuffling leaves it at that: which source comes
    when stays as it is, so that every step has its share of each.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        lanes: int,
        seed: int,
        shards: Sequence[int] = (),
        weights: Sequence[float] = (),
        window: int = 0,
    ) -> None:
        counts = list(shards) or [len(sizes)]
        self.first = [end - count for end, count in zip(accumulate(counts), counts, strict=True)]
        """The first shard of each source."""
        cut = [list(sizes[start : start + count]) for start, count in zip(self.first, counts, strict=True)]
        self.sources = [Lanes(own, lanes, seed) for own in cut]
        self.weights = list(weights) or [float(sum(own)) for own in cut]
        self._shares = [weight / sum(self.weights) for weight in self.weights]
        self.lanes, self.seed, self.window = lanes, seed, window
        self._shuffled: tuple[Position, list[LaneItem], Position] | None = None

    @classmethod
    def of(cls, identity: Mapping[str, Any]) -> Order:
        """From what `identity` gave, also from a ledger's line of before there were several sources."""
        optional = {key: identity[key] for key in ("weights", "window") if key in identity}
        counts = identity.get("sources", ())
        return cls(identity["sizes"], identity["lanes"], identity["seed"], counts, **optional)

    def identity(self) -> dict[str, Any]:
        """What the order depends on, as JSON values: sizes of the shards, lanes, seed, sources (shards of each),
        weights, window."""
        sizes = [size for source in self.sources for size in source.sizes]
        counts = [len(source.sizes) for source in self.sources]
        told = {"sizes": sizes, "lanes": self.lanes, "seed": self.seed, "sources": counts}
        return told | {"weights": self.weights, "window": self.window}  # normalised anew, weights would differ in a bit

    def source_of(self, shard: int) -> int:
        """The source that a shard belongs to."""
        return bisect_right(self.first, shard) - 1

    def start(self) -> Position:
        """The position before the first sample."""
        return Position(tuple(source.start() for source in self.sources), (0,) * len(self.sources), 0, self.window)

    def take(self, position: Position, n: int) -> tuple[list[LaneItem], Position]:
        """The next `n` samples (shards numbered over all sources) and the position after them. Pure."""
        if not self.window:
            return self._draw(position, n)
        items: list[LaneItem] = []
        while len(items) < n:
            window, after = self._window(replace(position, offset=0, window=self.window))
            new = window[position.offset : position.offset + n - len(items)]
            items += new
            offset = position.offset + len(new)
            position = replace(position, offset=offset) if offset < self.window else after
        return items, position

    def _window(self, start: Position) -> tuple[list[LaneItem], Position]:
        """The samples of a window in their shuffled order, and the position after it; the last one is kept."""
        if self._shuffled is None or self._shuffled[0] != start:
            items, after = self._draw(start, self.window)
            order = keyed_order(self.window, self.seed, _WINDOW + sum(start.taken) // self.window)
            queues: list[list[LaneItem]] = [[] for _ in self.sources]
            for i in reversed(order.tolist()):
                queues[self.source_of(items[i].shard)].append(items[i])
            mixed = [queues[self.source_of(item.shard)].pop() for item in items]
            self._shuffled = start, mixed, replace(after, window=self.window)
        return self._shuffled[1:]

    def _draw(self, position: Position, n: int) -> tuple[list[LaneItem], Position]:
        """The next samples of the mixed order: each from the source that is furthest behind its share."""
        if len(self.sources) == 1:
            items, after = self.sources[0].take(position.sources[0], n)
            return items, Position((after,), (position.taken[0] + n,))
        taken, turns = list(position.taken), []
        done = sum(taken)
        for number in range(done + 1, done + n + 1):
            behind = [share * number - count for share, count in zip(self._shares, taken, strict=True)]
            source = behind.index(max(behind))
            taken[source] += 1
            turns.append(source)
        drawn: list[Iterator[LaneItem]] = []
        cursors: list[Cursors] = []
        for source, (lanes, first) in enumerate(zip(self.sources, self.first, strict=True)):
            items, after = lanes.take(position.sources[source], taken[source] - position.taken[source])
            drawn.append(iter([replace(item, shard=item.shard + first) for item in items]))
            cursors.append(after)
        return [next(drawn[source]) for source in turns], Position(tuple(cursors), tuple(taken))
