from collections import Counter
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_strategies import plans

from mmlab.parallel.pipeline import forward_ops
from mmlab.plan import Layout, Op, Plan, Schedule, bubble, build_schedule, simulate
from mmlab.plan.schedule import DeadlockError, estimated_costs, measured_timeline, needs_backward, tokens_need_grad


def holders(plan) -> list[tuple[int, int]]:
    """(position in the pipeline, chunk) of each stage, written down independently of the layout."""
    p = plan.parallel
    if p.schedule == "zb_v":
        return [(pp, 0) for pp in range(p.pp)] + [(pp, 1) for pp in reversed(range(p.pp))]
    chunks = (p.chunks or 2) if p.schedule == "interleaved" else 1
    return [(pp, chunk) for chunk in range(chunks) for pp in range(p.pp)]


def expected(plan, place) -> set[tuple[str, int, int]]:
    """What a rank must do, from what trains, written down independently of the order: (kind, microbatch, chunk)."""
    p, t = plan.parallel, plan.train
    beside = p.projector == "vision"
    tokens_train = not t.vision.frozen or (beside and not t.projector.frozen)
    kinds, heads, once, trains = set(), set(), {"norm", "update"}, False
    if place.vision >= 0:
        heads |= {"encode"} | ({"encode_backward"} if tokens_train else set())
        kinds |= {("send_tokens", 0)} | ({("recv_token_grads", 0)} if tokens_train else set())
        once |= {"encode_ahead"} if p.encoder_ahead else set()
        trains = tokens_train
    if place.role == "language":
        where = holders(plan)
        before = tokens_train or (not beside and not t.projector.frozen) or not t.language.frozen
        split = p.schedule.startswith("zb")
        trains = trains or not t.language.frozen
        trains = trains or (where[0][0] == place.pp and not beside and not t.projector.frozen)
        for stage, (pp, chunk) in enumerate(where):
            if pp != place.pp:
                continue
            first, last = stage == 0, stage == len(where) - 1
            comes = set() if first or where[stage - 1][0] == pp else {"recv_forward", "send_backward"}
            goes = set() if last or where[stage + 1][0] == pp else {"send_forward", "recv_backward"}
            weights = not t.language.frozen or (first and not beside and not t.projector.frozen)
            here = {"forward"} | ({"recv_tokens"} if first else set()) | comes | goes
            here |= {"backward_input" if split else "backward"} | ({"backward_weight"} if split and weights else set())
            if first and tokens_train and (place.tp == 0 or place.vision >= 0 or p.transfer == "all_gather"):
                here |= {"send_token_grads"}
            if not before:
                here -= {"backward", "backward_input", "send_backward", "recv_backward"}
            kinds |= {(kind, chunk) for kind in here}
        ends = {where[0][0], where[-1][0]}
        if len(ends) == 2 and place.pp in ends and plan.model.language.tied_embeddings and not t.language.frozen:
            once |= {"reduce_embedding"}
    once |= {"reduce"} if trains else set()
    each = {(kind, i, chunk) for kind, chunk in kinds for i in range(p.microbatches)}
    each |= {(kind, i, 0) for kind in heads for i in range(0, p.microbatches, p.encoder_batch)}
    return each | {(kind, -1, 0) for kind in once}


@given(plans())
def test_every_rank_does_exactly_what_it_must_once(plan):
    schedule, layout = build_schedule(plan), Layout(plan)
    for place, ops in zip(layout.places, schedule.ops, strict=True):
        assert Counter((op.kind, op.microbatch, op.chunk) for op in ops) == Counter(expected(plan, place))
        assert [op.kind for op in ops if op.microbatch < 0][-2:] == ["norm", "update"]


@given(plans())
def test_what_one_rank_sends_another_receives_in_the_same_order(plan):
    """In the same order for each direction of a pair: what NCCL's one stream for a pair asks for."""
    schedule, layout = build_schedule(plan), Layout(plan)
    where = holders(plan)
    for sent, received in (("send_forward", "recv_forward"), ("send_backward", "recv_backward")):
        pairs: dict[tuple[int, int], list[tuple[int, int]]] = {}
        taken: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for rank, ops in enumerate(schedule.ops):
            for op in ops:
                stage = where.index((layout.place(rank).pp, op.chunk)) if op.kind in (sent, received) else -1
                below = stage - (op.kind in ("recv_forward", "send_backward"))
                if op.kind == sent:
                    pairs.setdefault((rank, op.peer), []).append((below, op.microbatch))
                if op.kind == received:
                    taken.setdefault((op.peer, rank), []).append((below, op.microbatch))
        assert pairs == taken
    first = [op.microbatch for op in schedule.ops[layout.first] if op.kind == "send_token_grads"]
    assert [op.microbatch for op in schedule.ops[0] if op.kind == "recv_token_grads"] == first


@given(plans())
def test_no_schedule_deadlocks_and_data_arrives_before_it_is_used(plan):
    schedule, layout = build_schedule(plan), Layout(plan)
    timeline = simulate(schedule, plan)
    starts: dict[tuple[int, str, int, int], float] = {}
    ends: dict[tuple[int, str, int, int], float] = {}
    for rank, timed in enumerate(timeline):
        assert [t.op for t in timed] == schedule.ops[rank]
        assert all(a.end <= b.start for a, b in pairwise(timed))
        for op, start, end in timed:
            kind = "backward" if op.kind == "backward_input" else op.kind
            starts[rank, kind, op.microbatch, op.chunk], ends[rank, kind, op.microbatch, op.chunk] = start, end
    for i, pipe in product(range(plan.parallel.microbatches), layout.pipelines):
        stages = [(pipe[pp], chunk) for pp, chunk in holders(plan)]
        for rank, chunk in stages:
            if (rank, "backward", i, chunk) in starts:
                assert starts[rank, "backward", i, chunk] >= ends[rank, "forward", i, chunk]
            if (rank, "backward_weight", i, chunk) in starts:
                assert starts[rank, "backward_weight", i, chunk] >= ends[rank, "backward", i, chunk]
        for (before, c), (after, d) in pairwise(stages):
            assert starts[after, "forward", i, d] >= ends[before, "forward", i, c]
            if needs_backward(plan, len(stages) - 1):
                assert starts[before, "backward", i, c] >= ends[after, "backward", i, d]
    encoder_in_time(plan, layout, starts, ends)


def encoder_in_time(plan, layout, starts, ends):
    """Images are encoded before their forward, and go backward after it has come back."""
    for i in range(plan.parallel.microbatches):
        together = i - i % plan.parallel.encoder_batch
        for pipe in layout.pipelines:
            for v in layout.encoders_of(layout.place(pipe[0]).dp):
                assert starts[pipe[0], "forward", i, 0] >= ends[v, "encode", together, 0]
        for v in layout.vision_ranks if tokens_need_grad(plan) else ():
            at = layout.place(v)
            replicas = [at.dp] if plan.parallel.vision == "first_stage" else range(plan.parallel.dp)
            done = max(ends[layout.rank_of(pp=0, dp=d), "backward", i, 0] for d in replicas)
            assert starts[v, "encode_backward", together, 0] >= done


@given(plans(), st.integers(1, 6))
def test_the_forward_half_alone_does_not_deadlock_either(plan, microbatches):
    """Evaluation runs it, with a first part of the microbatches."""
    ops = [forward_ops(each, microbatches) for each in build_schedule(plan).ops]
    assert {op.microbatch for each in ops for op in each} == set(range(min(microbatches, plan.parallel.microbatches)))
    simulate(Schedule(plan, ops), plan)


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
    assert costs[2, "backward", 0] == pytest.approx(2 * costs[2, "forward", 0])
    assert frozen[2, "backward", 0] == pytest.approx(frozen[2, "forward", 0])
    assert again[2, "backward", 0] == pytest.approx(3 * again[2, "forward", 0])
    assert 0 < frozen[0, "encode_backward", 0] < costs[0, "encode", 0]


def test_a_measured_step_is_set_against_the_earliest_rank():
    traces = [{"t0": 100.5, "ops": [["forward", 0, 0.0, 1.0]]}, {"t0": 100.0, "ops": [["backward", 1, 0.25, 0.5]]}]
    first, second = measured_timeline(traces)
    assert first == [(Op("forward", 0), 0.5, 1.5)]
    assert second == [(Op("backward", 1), 0.25, 0.5)]
    assert bubble([first, second]) == pytest.approx(1 - (1.0 + 0.25) / (1.25 * 2))
    assert bubble([[]]) == 0.0
