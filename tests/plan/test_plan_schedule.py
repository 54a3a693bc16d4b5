from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from plan_strategies import plans

from mmlab.errors import PlanError
from mmlab.plan import Layout, Op, Plan, Schedule, bubble, build_schedule, simulate
from mmlab.plan.schedule import DeadlockError, estimated_costs, measured_timeline, needs_backward, tokens_need_grad


def expected(plan, place) -> set[tuple[str, int]]:
    """What a rank must do, from what trains, written down independently of the order."""
    p, t = plan.parallel, plan.train
    beside = p.projector == "vision"
    tokens_train = not t.vision.frozen or (beside and not t.projector.frozen)
    kinds, heads, once, trains = set(), set(), {"norm", "update"}, False
    if place.vision >= 0:
        heads |= {"encode"} | ({"encode_backward"} if tokens_train else set())
        kinds |= {"send_tokens"} | ({"recv_token_grads"} if tokens_train else set())
        trains = tokens_train
    if place.role == "language":
        first, last = place.pp == 0, place.pp == p.pp - 1
        before = tokens_train or (not beside and not t.projector.frozen) or not t.language.frozen
        kinds |= {"forward", "recv_tokens" if first else "recv_forward"} | (set() if last else {"send_forward"})
        if before:
            kinds |= {"backward"} | (set() if last else {"recv_backward"}) | (set() if first else {"send_backward"})
        if first and tokens_train and (place.tp == 0 or place.vision >= 0 or p.transfer == "all_gather"):
            kinds |= {"send_token_grads"}
        trains = trains or not t.language.frozen or (first and not beside and not t.projector.frozen)
        if p.pp > 1 and (first or last) and plan.model.language.tied_embeddings and not t.language.frozen:
            once |= {"reduce_embedding"}
    once |= {"reduce"} if trains else set()
    each = {(kind, i) for kind in kinds for i in range(p.microbatches)}
    each |= {(kind, i) for kind in heads for i in range(0, p.microbatches, p.encoder_batch)}
    return each | {(kind, -1) for kind in once}


@given(plans())
def test_every_rank_does_exactly_what_it_must_once(plan):
    schedule, layout = build_schedule(plan), Layout(plan)
    for place, ops in zip(layout.places, schedule.ops, strict=True):
        assert Counter((op.kind, op.microbatch) for op in ops) == Counter(expected(plan, place))
        assert [op.kind for op in ops if op.microbatch < 0][-2:] == ["norm", "update"]


@given(plans())
def test_what_one_rank_sends_another_receives_in_the_same_order(plan):
    schedule = build_schedule(plan)
    for sent, received in (("send_forward", "recv_forward"), ("send_backward", "recv_backward")):
        pairs: dict[tuple[int, int], list[int]] = {}
        taken: dict[tuple[int, int], list[int]] = {}
        for rank, ops in enumerate(schedule.ops):
            for op in ops:
                if op.kind == sent:
                    pairs.setdefault((rank, op.peer), []).append(op.microbatch)
                if op.kind == received:
                    taken.setdefault((op.peer, rank), []).append(op.microbatch)
        assert pairs == taken
    first = [op.microbatch for op in schedule.ops[Layout(plan).first] if op.kind == "send_token_grads"]
    assert [op.microbatch for op in schedule.ops[0] if op.kind == "recv_token_grads"] == first


@given(plans())
def test_no_schedule_deadlocks_and_data_arrives_before_it_is_used(plan):
    schedule, layout = build_schedule(plan), Layout(plan)
    timeline = simulate(schedule, plan)
    ends: dict[tuple[int, str, int], float] = {}
    starts: dict[tuple[int, str, int], float] = {}
    for rank, timed in enumerate(timeline):
        assert [t.op for t in timed] == schedule.ops[rank]
        assert all(a.end <= b.start for a, b in pairwise(timed))
        for op, start, end in timed:
            starts[rank, op.kind, op.microbatch], ends[rank, op.kind, op.microbatch] = start, end
    for i in range(plan.parallel.microbatches):
        for pipe in layout.pipelines:
            for v in layout.encoders_of(layout.place(pipe[0]).dp):
                assert starts[pipe[0], "forward", i] >= ends[v, "encode", i - i % plan.parallel.encoder_batch]
            if needs_backward(plan, 0):
                assert all(starts[rank, "backward", i] >= ends[rank, "forward", i] for rank in pipe)
            for before, after in pairwise(pipe):
                assert starts[after, "forward", i] >= ends[before, "forward", i]
                if needs_backward(plan, plan.parallel.pp - 1):
                    assert starts[before, "backward", i] >= ends[after, "backward", i]
        if tokens_need_grad(plan):
            for v in layout.vision_ranks:
                at = layout.place(v)
                replicas = [at.dp] if plan.parallel.vision == "first_stage" else range(plan.parallel.dp)
                done = max(ends[layout.rank_of(pp=0, dp=d), "backward", i] for d in replicas)
                assert starts[v, "encode_backward", i - i % plan.parallel.encoder_batch] >= done


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("pp", "m"), [(1, 3), (2, 1), (2, 2), (2, 8), (4, 4), (4, 16)])
def test_the_bubble_is_the_one_of_the_papers(name, pp, m):
    plan = Plan().with_({"parallel.pp": pp, "parallel.microbatches": m, "parallel.schedule": name})
    timeline = simulate(plan.schedule(), plan, {"forward": 1.0, "backward": 2.0})
    assert bubble(timeline) == pytest.approx((pp - 1) / (m + pp - 1))


def test_1f1b_holds_fewer_microbatches_than_gpipe():
    def most_in_flight(plan, stage):
        held = most = 0
        for op in plan.schedule().ops[plan.layout().rank_of(pp=stage)]:
            held += (op.kind == "forward") - (op.kind == "backward")
            most = max(most, held)
        return most

    plan = Plan().with_("parallel.pp=4", "parallel.microbatches=8")
    assert [most_in_flight(plan, stage) for stage in range(4)] == [4, 3, 2, 1]
    assert [most_in_flight(plan.with_("parallel.schedule=gpipe"), stage) for stage in range(4)] == [8] * 4


@pytest.mark.parametrize(
    ("rank", "first", "second"),
    [(1, "recv_tokens", "recv_backward"), (3, "norm", "forward"), (2, "send_forward", "recv_backward")],
)
def test_a_deadlock_is_found_and_names_the_ranks(rank, first, second):
    plan = Plan().with_("parallel.pp=3", "parallel.microbatches=2", "parallel.schedule=gpipe")
    schedule = plan.schedule()
    ops = list(schedule.ops[rank])
    a = next(i for i, op in enumerate(ops) if op.kind == first)
    b = next(i for i, op in enumerate(ops) if op.kind == second)
    ops[a], ops[b] = ops[b], ops[a]
    broken = Schedule(plan, [*schedule.ops[:rank], ops, *schedule.ops[rank + 1 :]])
    with pytest.raises(DeadlockError, match=rf"rank {rank} in Op\("):
        simulate(broken, plan)


def test_a_lost_tensor_rank_is_a_deadlock():
    plan = Plan().with_("parallel.tp=2")
    schedule = plan.schedule()
    lame = [op for op in schedule.ops[2] if op.kind != "forward"]
    with pytest.raises(DeadlockError, match="rank 1 in Op"):
        simulate(Schedule(plan, [*schedule.ops[:2], lame]), plan)


def test_frozen_parts_cost_less():
    plan = Plan.preset("quickstart")
    costs = estimated_costs(plan)
    frozen = estimated_costs(plan.with_("train.vision.frozen=true", "train.language.frozen=true"))
    again = estimated_costs(plan.with_("train.activation_checkpointing=true"))
    assert costs[2, "backward"] == pytest.approx(2 * costs[2, "forward"])
    assert frozen[2, "backward"] == pytest.approx(frozen[2, "forward"])
    assert again[2, "backward"] == pytest.approx(3 * again[2, "forward"])
    assert 0 < frozen[0, "encode_backward"] < costs[0, "encode"]


def test_schedules_of_later_versions_are_refused():
    with pytest.raises(PlanError, match=r"parallel\.schedule"):
        Plan().with_("parallel.schedule=zb_v").schedule()


def test_a_measured_step_is_set_against_the_earliest_rank():
    traces = [{"t0": 100.5, "ops": [["forward", 0, 0.0, 1.0]]}, {"t0": 100.0, "ops": [["backward", 1, 0.25, 0.5]]}]
    first, second = measured_timeline(traces)
    assert first == [(Op("forward", 0), 0.5, 1.5)]
    assert second == [(Op("backward", 1), 0.25, 0.5)]
    assert bubble([first, second]) == pytest.approx(1 - (1.0 + 0.25) / (1.25 * 2))
    assert bubble([[]]) == 0.0
