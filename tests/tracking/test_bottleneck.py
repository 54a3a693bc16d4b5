"""What holds a run back, from the times of its steps, and whether what is suggested can be done."""

import pytest

from mmlab.messages import PHASES
from mmlab.plan import Plan
from mmlab.tracking.bottleneck import Bottleneck

STEP = 0.2


def row(**seconds):
    return [seconds.get(phase, 0.001) for phase in PHASES]


def steps(rows, count=6, **more):
    return [{"step": n, "seconds": STEP, "phases": rows} | more for n in range(1, count + 1)]


def quickstart(vision=None, first=None, last=None):
    """Rows of the six ranks of the quickstart plan: two encoders, two stages of two tensor ranks."""
    return [row(**(vision or {}))] * 2 + [row(**(first or {}))] * 2 + [row(**(last or {}))] * 2


BUSY = {"forward": 0.07, "backward": 0.1}
SMALL = ("data.global_batch=4", "parallel.microbatches=4")
TWICE = ("parallel.dp=2", "parallel.tp=1")
SENT = {"language": [1e6, 1e6]}
EXPOSED = {"language": {"seconds": 0.1, "exposed": 0.09}, "vision": {"seconds": 0.05, "exposed": 0.02}}
CASES = [
    ("data", (), quickstart({"data": 0.08}, {"exchange": 0.05} | BUSY, {"pipeline": 0.1}), {}, "data.workers=1"),
    ("data", (), quickstart({"data": 0.08}, BUSY, BUSY), {"data_queue": 0}, "data.workers=1"),
    ("data", (), quickstart({"data": 0.08}, BUSY, BUSY), {"data_queue": 2}, "data.prefetch=4"),
    ("encoder", (), quickstart({"encode": 0.19}, {"exchange": 0.06} | BUSY), {}, "parallel.vision_dp=3"),
    ("encoder", ("train.vision.frozen=true",), quickstart({}, {"exchange": 0.06}), {}, "parallel.encoder_ahead=1"),
    ("pipeline", (), quickstart({}, {"pipeline": 0.05}, {"pipeline": 0.04}), {}, "parallel.microbatches=4"),
    ("pipeline", SMALL, quickstart({}, {"pipeline": 0.05}, {"pipeline": 0.04}), {}, "parallel.schedule=zb_h1"),
    ("optimizer", TWICE, quickstart({}, {"optimizer": 0.03}, {"optimizer": 0.04}), {}, "parallel.sharding=zero1"),
    ("communication", TWICE, quickstart({}, BUSY, BUSY), {"communication": EXPOSED, "traffic": SENT},
     "communication.language.compressor=powersgd"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("cause", "changes", "rows", "more", "hint"),
    CASES,
    ids=[f"{c[0]}-{c[4]}{c[3].get('data_queue', '')}" for c in CASES],
)
def test_the_cause_is_named_with_its_time_and_something_to_try(cause, changes, rows, more, hint):
    plan = Plan.preset("quickstart").with_(*changes)
    assert not plan.check()
    found = Bottleneck(plan, steps(rows, **more))
    assert found.cause == cause
    assert found.changes == (hint,)
    assert not plan.with_(*found.changes).check()
    assert f"of 200 ms of a step ({found.waits[0].share:.0%})" in str(found)
    assert f"Try {hint}." in str(found)


LARGER = ("data.global_batch=16", "parallel.microbatches=4")


@pytest.mark.parametrize(
    ("now", "megabytes", "waited", "coding", "changes"),
    [
        ("none", 1, 0.09, 0.0, ("communication.language.compressor=powersgd",)),
        ("none", 500, 0.09, 0.0, LARGER),  # 2.5 GB/s: faster than coding
        ("int8", 1, 0.06, 0.01, ("communication.language.compressor=powersgd",)),
        ("powersgd", 1, 0.06, 0.01, LARGER),
        ("powersgd", 1, 0.01, 0.05, ("communication.language.compressor=none",)),
    ],
)
def test_fewer_bytes_are_suggested_where_the_link_is_slow_and_less_coding_where_that_is(
    now, megabytes, waited, coding, changes
):
    plan = Plan.preset("quickstart").with_(*TWICE, "data.global_batch=8", f"communication.language.compressor={now}")
    more = {
        "communication": {"language": {"seconds": 0.1, "exposed": waited}},
        "traffic": {"language": [megabytes * 1e6, megabytes * 1e6]},
    } | ({} if now == "none" else {"compression": {"language": {"compressor": now, "seconds": coding}}})
    found = Bottleneck(plan, steps(quickstart({}, BUSY, BUSY), **more))
    assert found.waits[0].seconds == pytest.approx(waited + coding)
    assert found.changes == changes


def test_the_encoders_ranks_and_the_others_wait_at_the_same_time():
    more = {
        "communication": {"vision": {"seconds": 0.1, "exposed": 0.09}, "language": {"seconds": 0.1, "exposed": 0.08}}
    }
    found = Bottleneck(Plan.preset("quickstart").with_(*TWICE), steps(quickstart({}, BUSY, BUSY), **more))
    assert found.waits[0].seconds == pytest.approx(0.09)


def test_what_is_shared_out_already_is_not_suggested():
    plan = Plan.preset("quickstart").with_(*TWICE, "parallel.sharding=zero1")
    found = Bottleneck(plan, steps(quickstart({}, {"optimizer": 0.03}, {"optimizer": 0.04})))
    assert (found.cause, found.changes) == ("optimizer", ())


def test_a_compressor_that_waits_for_its_warm_up_is_not_suggested():
    plan = Plan.preset("quickstart").with_(*TWICE, "data.global_batch=8", "communication.language.compressor=powersgd")
    found = Bottleneck(plan, steps(quickstart({}, BUSY, BUSY), communication=EXPOSED, traffic=SENT))
    assert found.changes == LARGER


def test_a_run_that_only_computes_is_held_back_by_nothing():
    found = Bottleneck(Plan.preset("quickstart"), steps(quickstart({"encode": 0.1}, BUSY, BUSY)))
    assert found.cause == "compute"
    assert "Nothing but computing takes 10% of a step (200 ms)" in str(found)
    assert found.changes == ()


def test_the_first_steps_do_not_count():
    slow = steps(quickstart({"data": 9.0}, BUSY, BUSY), count=2)
    found = Bottleneck(Plan.preset("quickstart"), slow + steps(quickstart({}, BUSY, BUSY), count=3))
    assert found.cause == "compute"
    assert Bottleneck(Plan.preset("quickstart"), slow).cause == "data"  # there are no others yet


def test_without_times_it_says_so():
    found = Bottleneck(Plan.preset("quickstart"), [{"step": 1, "seconds": 0.1}])
    assert str(found).startswith("nothing was timed")
    assert found.waits == []
