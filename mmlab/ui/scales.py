"""Axes of charts: ranges, round ticks, smoothing. Shared by the still picture and the report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def span(values: Iterable[float], from_zero: bool = False) -> tuple[float, float]:
    """The range of an axis that shows the finite values, with some room; (0, 1) without any."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return 0.0, 1.0
    low, high = min(finite), max(finite)
    if from_zero:
        return 0.0, high * 1.08 or 1.0
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    return max(0.0, low - room) if low >= 0 else low - room, high + room


def nice_ticks(low: float, high: float, count: int) -> list[float]:
    """About `count` round numbers from low to high."""
    if not high > low:
        return [low]
    rough = (high - low) / max(1, count)
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * size for factor in (1, 2, 5, 10) if factor * size >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def smooth(values: Sequence[float]) -> list[float]:
    """The mean around each value, over a twentieth of all values (so without lag); the ends use fewer.

    Values that are no numbers are passed over, NaN where there is no other.
    """
    reach = len(values) // 40
    sums, counts = [0.0], [0]
    for value in values:
        finite = math.isfinite(value)
        sums.append(sums[-1] + (value if finite else 0.0))
        counts.append(counts[-1] + finite)
    result = []
    for index in range(len(values)):
        room = min(reach, index, len(values) - 1 - index)
        low, high = index - room, index + room + 1
        count = counts[high] - counts[low]
        result.append((sums[high] - sums[low]) / count if count else math.nan)
    return result
