"""The benchmark itself: every schedule runs on both sides with the same gradients. Nothing is asserted by the clock."""

import pytest
import schedules


@pytest.mark.slow
def test_sleeping_stages_stand_beside_what_their_op_list_predicts(pool):
    row = schedules.sleeping(pool, "zb_v", 2, 3, steps=1, seconds=0.01)
    assert 0 < row["predicted"] < 0.2
    assert 0 < row["measured"] < 1
    assert schedules.sleep_table([row]).splitlines()[1].split()[:3] == ["zb_v", "2", "3"]


@pytest.mark.parametrize(
    "schedule", ["zb_v", *(pytest.param(name, marks=pytest.mark.slow) for name in schedules.SCHEDULES[:-1])]
)
def test_both_sides_compute_the_same(pool, schedule):
    row = schedules.peers(pool, schedule, 2, 4, rounds=1, tokens=32, hidden=32, layers=4)
    assert row["error"] < 1e-4
    assert row["losses"]["torch"] == pytest.approx(row["losses"]["shm"], rel=1e-5)
    assert row["losses"]["gloo"] == pytest.approx(row["losses"]["shm"], rel=1e-6)
    assert row["ratio_shm"] == row["torch"] / row["shm"] > 0
    assert schedules.peer_table([row]).splitlines()[1].startswith(schedule)
