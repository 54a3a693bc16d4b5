"""Curves in bounded memory: what a chart needs of a run of any length.

Once full, neighbouring points are merged into buckets that keep their lowest and
highest point, so spikes survive (min/max decimation) and a million steps take
as much room as a few thousand.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from math import isfinite

CAPACITY = 4000
"""Points kept for each curve: more than twice the pixels of a wide chart."""


class Series:
    """One curve: (x, y) points with rising x, at most `capacity` of them."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        if capacity < 4:
            raise ValueError("a series needs room for at least four points")
        self.capacity = capacity
        self.last: tuple[float, float] | None = None
        self._x = array("d")
        self._y = array("d")
        self._bucket = 1
        self._low: tuple[float, float] | None = None
        self._high: tuple[float, float] | None = None
        self._seen = 0

    def __len__(self) -> int:
        return len(self._x) + len(self._open())

    @property
    def whole(self) -> bool:
        """Whether no point has been merged yet."""
        return self._bucket == 1

    def add(self, x: float, y: float) -> None:
        """Append a point."""
        self.last = point = (x, y)
        if self._bucket == 1:
            self._x.append(x)
            self._y.append(y)
            if len(self._x) >= self.capacity:
                self._halve()
            return
        low, high = self._low, self._high
        if low is None or high is None or not isfinite(low[1]):
            self._low = self._high = point
        elif y < low[1] and isfinite(y):
            self._low = point
        elif y > high[1] and isfinite(y):
            self._high = point
        self._seen += 1
        if self._seen >= self._bucket:
            self._close()

    def extend(self, x: Sequence[float], y: Sequence[float]) -> None:
        """Append points: what `add` makes of each, in a fifth of the time."""
        start = 0
        while start < len(x):
            room = self.capacity - len(self._x) if self._bucket == 1 else self._bucket - self._seen
            some = slice(start, start + room)
            if self._bucket > 1:
                self._widen(x[some], y[some])
            else:
                self._x.extend(x[some])
                self._y.extend(y[some])
                if len(self._x) >= self.capacity:
                    self._halve()
            start += room
        if x:
            self.last = (x[-1], y[-1])

    def _widen(self, x: Sequence[float], y: Sequence[float]) -> None:
        """Take points into the open bucket, which has room for them."""
        if not isfinite(sum(y)) or (self._low is not None and not isfinite(self._low[1])):
            for point in zip(x, y, strict=True):
                self.add(*point)
            return
        low, high = min(y), max(y)
        if self._low is None or low < self._low[1]:
            self._low = (x[y.index(low)], low)
        if self._high is None or high > self._high[1]:
            self._high = (x[y.index(high)], high)
        self._seen += len(x)
        if self._seen >= self._bucket:
            self._close()

    def points(self) -> tuple[array[float], array[float]]:
        """Copies of all x and y, in order."""
        x, y = self._x[:], self._y[:]
        for point in self._open():
            x.append(point[0])
            y.append(point[1])
        return x, y

    def between(self, low: float, high: float) -> Series:
        """The points from low to high."""
        found = Series(self.capacity)
        for x, y in zip(*self.points(), strict=True):
            if low <= x <= high:
                found.add(x, y)
        return found

    def cut(self, x: float) -> None:
        """Forget what lies beyond x (a restore goes back to that step)."""
        kept = [point for point in zip(*self.points(), strict=True) if point[0] <= x]
        self._x = array("d", (point[0] for point in kept))
        self._y = array("d", (point[1] for point in kept))
        self._low, self._high, self._seen = None, None, 0
        self.last = kept[-1] if kept else None

    def _open(self) -> list[tuple[float, float]]:
        """The extremes of the bucket that is not full yet, and the newest point: a chart tells it as the last."""
        if self._low is None or self._high is None:
            newest = self.last
            return [newest] if newest is not None and self._x and newest[0] > self._x[-1] else []
        return sorted({self._low, self._high, self.last or self._high})

    def _close(self) -> None:
        low, high = self._low, self._high
        for x, y in [] if low is None or high is None else sorted({low, high}):
            self._x.append(x)
            self._y.append(y)
        self._low, self._high, self._seen = None, None, 0
        if len(self._x) >= self.capacity:
            self._halve()

    def _halve(self) -> None:
        """Each four points become two, so a bucket that gives two points stands for twice (at first four) as many."""
        x, y = self._x.tolist(), self._y.tolist()
        fours = [slice(start, start + 4) for start in range(0, len(x), 4)]
        kept = [point for four in fours for point in _extremes(x[four], y[four])]
        self._x = array("d", [point[0] for point in kept])
        self._y = array("d", [point[1] for point in kept])
        self._bucket = 4 if self._bucket == 1 else 2 * self._bucket


def _extremes(x: list[float], y: list[float]) -> list[tuple[float, float]]:
    """The lowest and the highest point in order of x; points that are no numbers count only when alone."""
    if not isfinite(sum(y)):
        numbers = [point for point in zip(x, y, strict=True) if isfinite(point[1])] or [(x[-1], y[-1])]
        x, y = [point[0] for point in numbers], [point[1] for point in numbers]
    low, high = y.index(min(y)), y.index(max(y))
    if x[low] == x[high]:
        return [(x[low], y[low])]
    return sorted(((x[low], y[low]), (x[high], y[high])))
