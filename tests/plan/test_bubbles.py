"""Bubbles: the formulas against the schedules played, shares of ranks, what ops wait for."""

from __future__ import annotations

import pytest

from mmlab.plan import Plan, bubble
from mmlab.plan.bubbles import ideal_bubble, idle_shares

EQUAL = {"forward": 1.0, "backward": 2.0, "backward_input": 1.0, "backward_weight": 1.0}
LONG = ("parallel.vision_dp=1", "parallel.tp=1", "model.language.layers=8", "data.global_batch=32")


def plan_of(schedule: str, p: int, m: int) -> Plan:
    return Plan.preset("quickstart").with_(
        *LONG, f"parallel.schedule={schedule}", f"parallel.pp={p}", f"parallel.microbatches={m}"
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zb_h1", "zb_v"])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (2, 8), (4, 4)])
def test_the_formula_is_what_playing_the_schedule_gives(schedule: str, p: int, m: int) -> None:
    plan = plan_of(schedule, p, m)
    ideal = ideal_bubble(plan)
    if schedule == "zb_v" and m < 2 * p - 1:
        assert ideal is None
        return
    assert ideal is not None
    assert ideal.share == pytest.approx(plan.schedule().bubble(EQUAL), abs=1e-9)
    v = plan.parallel.chunks_per_rank
    spoken = ideal.formula.replace("v m", f"{v * m}").replace("3 m", f"{3 * m}").replace("6 m", f"{6 * m}")
    assert eval(spoken, {"p": p, "m": m}) == pytest.approx(ideal.share)


@pytest.mark.parametrize("vision", ["own_ranks", "first_stage", "all_ranks"])
def test_shares_of_ranks_make_up_the_bubble_of_the_stages(vision: str) -> None:
    changes = ("parallel.vision_dp=0",) if vision != "own_ranks" else ()
    plan = Plan.preset("quickstart").with_(f"parallel.vision={vision}", *changes)
    timeline = plan.schedule().simulate()
    stages = [place.rank for place in plan.layout().places if place.role == "language"]
    shares = idle_shares(timeline)
    assert len(shares) == plan.world_size
    assert sum(shares[rank] for rank in stages) / len(stages) == pytest.approx(bubble(timeline))
    assert all(0 <= share <= 1 for share in shares)
    assert idle_shares([[] for _ in range(3)]) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("change", ["parallel.schedule=1f1b", "parallel.schedule=zb_v", "parallel.transfer=all_gather"])
def test_no_op_ends_before_what_it_waits_for(change: str) -> None:
    plan = Plan.preset("quickstart").with_(change, "parallel.microbatches=4")
    schedule = plan.schedule()
    timeline, after = schedule.simulate(), schedule.dependencies()
    met = 0
    for rank, ops in enumerate(timeline):
        for index, (op, start, end) in enumerate(ops):
            others = [timeline[other][at] for other, at in after[rank][index]]
            if op.kind.startswith("recv"):
                met += len(others)
                assert end >= max((other.end for other in others), default=end)
                assert {other.op.kind for other in others} <= {op.kind.replace("recv", "send"), op.kind}
            elif op.kind in ("forward", "norm", "backward"):
                assert all(other.op == op and other.start == start for other in others)
    assert met > 0
    last = after[0][-2]
    assert [rank for rank, _ in last] == [1, 2, 3, 4, 5], "all ranks meet in the one reduction of norms"
