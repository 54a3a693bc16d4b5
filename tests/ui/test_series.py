"""Curves in bounded memory keep what a chart needs."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmlab.ui.scales import nice_ticks, smooth, span
from mmlab.ui.series import Series

values = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=600)


@given(values=values, capacity=st.integers(4, 40))
@settings(max_examples=60, deadline=None)
def test_decimation_is_bounded_and_keeps_extremes_and_order(values: list[float], capacity: int) -> None:
    series = Series(capacity)
    for x, y in enumerate(values):
        series.add(x, y)
    xs, ys = series.points()
    assert len(xs) == len(ys) == len(series) <= capacity + 2
    assert list(xs) == sorted(set(xs))
    assert all(values[int(x)] == y for x, y in zip(xs, ys, strict=True))
    assert (min(ys), max(ys)) == (min(values), max(values))
    assert series.last == (len(values) - 1, values[-1]) == (xs[-1], ys[-1])


@given(
    pieces=st.lists(st.lists(st.floats(width=16), max_size=90), max_size=6),
    capacity=st.integers(4, 12),
    back=st.integers(0, 200),
)
@settings(max_examples=60, deadline=None)
def test_columns_are_taken_as_their_points_one_by_one(pieces: list[list[float]], capacity: int, back: int) -> None:
    single, columns = Series(capacity), Series(capacity)
    x = 0
    for piece in pieces:
        steps = list(range(x, x + len(piece)))
        for point in zip(steps, piece, strict=True):
            single.add(*point)
        columns.extend(steps, piece)
        assert repr((columns.points(), columns.last)) == repr((single.points(), single.last))
        x = max(0, steps[-1] - back if steps else x)  # a run goes back
        single.cut(x)
        columns.cut(x)


def test_short_series_are_kept_whole() -> None:
    series = Series(100)
    for x in range(99):
        series.add(x, x * x)
    assert list(series.points()[1]) == [x * x for x in range(99)]


def test_a_long_series_covers_its_length_evenly() -> None:
    series = Series(400)
    for x in range(100_000):
        series.add(x, math.sin(x))
    xs, _ = series.points()
    gaps = [b - a for a, b in pairwise(xs)]
    assert max(gaps) <= 2 * 100_000 / 100
    assert xs[-1] >= 100_000 - 2000


def test_cut_forgets_later_points_and_goes_on() -> None:
    series = Series(50)
    for x in range(500):
        series.add(x, -x)
    series.cut(200)
    xs, _ = series.points()
    assert xs[-1] <= 200
    assert series.last is not None
    assert series.last[0] == xs[-1]
    series.add(201, 5.0)
    assert series.last == (201, 5.0)
    assert series.points()[1][-1] == 5.0


def test_values_that_are_no_numbers_do_not_hide_numbers() -> None:
    series = Series(4)
    for x, y in enumerate([1.0, math.nan, 3.0, math.inf, 2.0, math.nan, 2.5, 2.6]):
        series.add(x, y)
    finite = [y for y in series.points()[1] if math.isfinite(y)]
    assert min(finite) == 1.0
    assert max(finite) == 3.0


def test_too_small_a_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="at least four"):
        Series(3)


def test_axes_show_all_finite_values_with_round_ticks() -> None:
    low, high = span([1.0, 5.0, math.nan, math.inf])
    assert low < 1 < 5 < high < 6
    assert span([], False) == (0.0, 1.0)
    assert span([3.0], True)[0] == 0.0
    assert nice_ticks(0, 120, 6) == [0, 20, 40, 60, 80, 100, 120]
    assert nice_ticks(0.87, 6.9, 5) == [2.0, 4.0, 6.0]


def test_smoothing_has_no_lag_and_passes_over_gaps() -> None:
    line = [float(x) for x in range(200)]
    assert smooth(line) == pytest.approx(line)
    gap = smooth([1.0] * 50 + [math.nan] + [1.0] * 50)
    assert gap == pytest.approx([1.0] * 101)
    assert math.isnan(smooth([math.nan])[0])
