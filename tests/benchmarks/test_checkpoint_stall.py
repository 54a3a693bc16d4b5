"""The benchmark itself runs, and both kinds of saves are whole. Nothing is asserted by the clock."""

import checkpoint_stall
import pytest

from mmlab.plan import Plan


@pytest.mark.slow
def test_both_kinds_of_saves_are_timed():
    found = checkpoint_stall.measure(Plan.preset("laptop"), rounds=2, steps=1)
    seconds = found["seconds"]
    assert [len(seconds[kind]) for kind in ("asynchronous", "synchronous", "writing", "plain")] == [2, 2, 2, 2]
    assert found["stall_ratio"] > 0
    assert found["megabytes"] > 0.1
