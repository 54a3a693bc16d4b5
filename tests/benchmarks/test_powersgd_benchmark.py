"""The benchmark itself: every side reduces the bucket. Nothing is asserted by the clock."""

import powersgd
import pytest


@pytest.mark.slow
def test_all_sides_reduce_the_bucket():
    rows = powersgd.measure([2], [1, 4], rounds=1)
    assert [(row["backend"], row["columns"]) for row in rows] == [(b, r) for b in ("shm", "gloo") for r in (0, 1, 4)]
    for row, dense in zip(rows, (rows[0],) * 3 + (rows[3],) * 3, strict=True):
        assert row["ratio"] == row["ms"] / dense["ms"] > 0
        assert row["ms"] >= row["coding"] > 0
    norms, edges = 2 * 288, 4 * (288 + 288) + 3 * (768 + 288)
    assert [row["sent"] for row in rows[:3]] == [
        4 * (4 * 288 * 288 + 3 * 768 * 288 + norms),
        4 * (edges + norms),
        4 * (4 * edges + norms),
    ]
    assert len(powersgd.table(rows).splitlines()) == 1 + len(rows)
