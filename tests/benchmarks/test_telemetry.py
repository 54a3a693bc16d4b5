"""The benchmark itself: both sides run, and only the watched one leaves records. Nothing is asserted by the clock."""

import pytest
import telemetry

from mmlab.plan import Plan


@pytest.mark.slow
def test_only_the_watched_side_is_recorded():
    found = telemetry.measure(Plan.preset("laptop"), rounds=2, steps=2)
    assert found["logged"] == telemetry.WARM_STEPS + 2 * 2
    assert all(len(found["seconds"][side]) == 2 and min(found["seconds"][side]) > 0 for side in ("on", "off"))
    assert found["overhead_percent"] == pytest.approx(100 * (found["off_steps_per_s"] / found["on_steps_per_s"] - 1))
