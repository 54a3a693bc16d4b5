"""Curves in bounded memory: what a chart needs of a run of any length.

Once full, neighbouring points are merged into buckets that keep their lowest and
highest point, so spikes survive (min/max decimation) and a million steps take
as much room as a few thousand.
"""

from __future__ import annotations

from array import array
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
        points = list(zip(self._x, self._y, strict=True))
        kept = [point for start in range(0, len(points), 4) for point in _extremes(points[start : start + 4])]
        self._x = array("d", (point[0] for point in kept))
        self._y = array("d", (point[1] for point in kept))
        self._bucket = 4 if self._bucket == 1 else 2 * self._bucket


def _extremes(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The lowest and the highest point in order of x; points that are no numbers count only when alone."""
    numbers = [point for point in points if isfinite(point[1])] or points[-1:]
    low = min(numbers, key=lambda point: point[1])
    high = max(numbers, key=lambda point: point[1])
    return [low] if low[0] == high[0] else sorted((low, high))
