"""The benchmark itself: every side is measured, and buckets are evener. Nothing is asserted by the clock."""

import buckets
import pytest


def test_every_bucket_is_evener_than_the_order(tmp_path):
    plan = buckets.plan_on(buckets.make_set(tmp_path, 128))
    found = [buckets.imbalance(plan.with_(*changes)) for changes in buckets.SIDES.values()]
    assert found[1]["tokens"] < found[0]["tokens"]
    assert found[2]["steps"] < found[0]["steps"]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_side_is_timed():
    sides = {name: buckets.SIDES[name] for name in ("as they come", "within 8 steps")}
    rows = buckets.measure(64, steps=1, rounds=1, block=1, sides=sides)
    assert [row["side"] for row in rows] == list(sides)
    assert all(row["gain"] > 0 and row["against_first"] > 0 and 0 <= row["waiting"] < 1 for row in rows)
