"""The benchmark itself: both sides run every call, and the ratio is of medians. Nothing is asserted by the clock."""

import collectives
import pytest


@pytest.mark.slow
def test_both_sides_make_every_call():
    rows = collectives.measure([2], [4], rounds=1)
    assert [row["call"] for row in rows] == list(collectives.CALLS)
    for row in rows:
        assert row["ratio"] == row["gloo"] / row["shm"] > 0
    text = collectives.table(rows).splitlines()
    assert len(text) == 1 + len(rows)
    assert text[1].split()[:3] == ["all_reduce", "4", "2"]
