"""Which samples a step has: the order as it comes, or regrouped within windows so that steps have equal work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from mmlab.data.buckets import deal
from mmlab.data.lanes import LaneItem
from mmlab.data.manifest import ManifestSample
from mmlab.data.order import Order, Position


class Batch(NamedTuple):
    """The samples of a step, and those that it would have without buckets (none where there are no buckets)."""

    samples: tuple[ManifestSample, ...]
    unbucketed: tuple[ManifestSample, ...] = ()


class Buckets:
    """The steps of an order: `batch` samples each, regrouped within windows of `window` samples (a multiple; 0: as they
    come) so that all steps of a window have about the same work.

    Independent of the layout. A step keeps its number of samples of each source, so that shares stay as even as the
    order has them. `measure` gives an item of the order its length and tiles.
    """

    def __init__(self, order: Order, batch: int, window: int, measure: Callable[[LaneItem], ManifestSample]) -> None:
        self.order, self.batch, self.window = order, batch, window
        self._measure = measure
        self._dealt: tuple[Position, list[Batch], Position] | None = None

    def take(self, position: Position) -> tuple[Batch, Position]:
        """The next step's samples, and the position after it. Pure."""
        if not self.window:
            items, after = self.order.take(position, self.batch)
            return Batch(tuple(map(self._measure, items))), after
        start = replace(position, grouped=0)
        if self._dealt is None or self._dealt[0] != start:
            self._dealt = (start, *self._deal(start))
        _, batches, after = self._dealt
        batch, grouped = batches[position.grouped // self.batch], position.grouped + self.batch
        return batch, replace(start, grouped=grouped) if grouped < self.window else after

    def _deal(self, start: Position) -> tuple[list[Batch], Position]:
        """The steps of a window, and the position after it."""
        items, after = self.order.take(start, self.window)
        samples = [self._measure(item) for item in items]
        sources = [self.order.source_of(item.shard) for item in items]
        firsts = range(0, self.window, self.batch)
        room = [Counter(sources[first : first + self.batch]) for first in firsts]
        dealt = deal([sample.work for sample in samples], len(room), sources, room)
        plain = [samples[first : first + self.batch] for first in firsts]
        batches = [Batch(tuple(samples[i] for i in part), tuple(p)) for part, p in zip(dealt, plain, strict=True)]
        return batches, after
