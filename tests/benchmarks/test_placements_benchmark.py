"""The benchmark itself: every side trains its blocks. Nothing is asserted by the clock."""

import placements
import pytest

from mmlab.plan import Plan


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_side_is_timed_in_every_round():
    sides = {"own": (), "merged": (*placements.MERGED, "parallel.pp=1"), "spread": placements.SPREAD}
    found = placements.measure(Plan.preset("laptop"), sides, rounds=2, steps=1)
    assert [row["ranks"] for row in found["rows"]] == [3, 1, 2]
    assert found["rows"][0]["against_first"] == 1.0
    assert all(len(times) == 2 and min(times) > 0 for times in found["seconds"].values())


def test_the_plans_of_all_sides_pass_the_rules():
    for sides in placements.SIDES.values():
        for overrides in sides.values():
            assert list(Plan.preset("quickstart").with_(*overrides).check()) == []
