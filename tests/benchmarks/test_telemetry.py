"""The benchmark itself: both sides run, and only the watched one leaves records. Nothing is asserted by the clock."""

import pytest
import telemetry

from mmlab.plan import Plan


@pytest.mark.slow
def test_only_the_watched_side_is_recorded():
    found = telemetry.measure(Plan.preset("laptop"), rounds=2, steps=2)
    assert found["logged"] == telemetry.WARM_STEPS + 2 * 2
    assert all(len(found["seconds"][side]) == 2 and min(found["seconds"][side]) > 0 for side in ("on", "off"))


def test_the_overhead_is_a_ratio_of_medians_and_lies_in_its_interval():
    off = [1.0, 1.1, 0.9, 1.0, 5.0]
    on = [1.02 * seconds for seconds in off]
    assert telemetry.overhead(on, off) == pytest.approx(2.0)
    low, high = telemetry.interval(on, off)
    assert low <= telemetry.overhead(on, off) <= high
