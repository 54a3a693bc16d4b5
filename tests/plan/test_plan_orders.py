"""The orders of passes: every pass once, the bubble and the memory that the papers give."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmlab.plan import Plan, simulate
from mmlab.plan.orders import interleaved, one_f_one_b, zero_bubble_h1, zero_bubble_v
from mmlab.plan.stages import Stages, even_split

sizes = st.tuples(st.integers(1, 8), st.integers(1, 30))


def passes(order) -> Counter:
    return Counter((each.kind, each.microbatch, each.chunk) for each in order)


def every(kinds, m, chunks=1) -> Counter:
    return Counter((kind, i, chunk) for kind in kinds for i in range(m) for chunk in range(chunks))


def most_live(order) -> int:
    """Most chunk activations held at once: from forward until the last backward pass of the microbatch."""
    last = "backward_weight" if any(each.kind == "backward_weight" for each in order) else "backward"
    live = most = 0
    for each in order:
        live += (each.kind == "forward") - (each.kind == last)
        most = max(most, live)
    return most


WHOLE = ("forward", "backward")
SPLIT = ("forward", "backward_input", "backward_weight")


@given(sizes)
def test_1f1b_holds_one_microbatch_fewer_at_each_stage(size):
    pp, m = size
    for stage in range(pp):
        order = one_f_one_b(stage, pp, m)
        assert passes(order) == every(WHOLE, m)
        assert most_live(order) == min(pp - stage, m)


@given(st.integers(1, 8), st.integers(1, 5), st.integers(2, 4))
def test_interleaved_holds_little_more_than_1f1b(pp, groups, chunks):
    m = pp * groups
    for rank in range(pp):
        order = interleaved(rank, pp, m, chunks)
        assert passes(order) == every(WHOLE, m, chunks)
        assert most_live(order) <= 2 * (pp - rank - 1) + (chunks - 1) * pp + 1


@given(sizes)
def test_zb_h1_holds_what_the_first_stage_of_1f1b_holds(size):
    pp, m = size
    for stage in range(pp):
        order = zero_bubble_h1(stage, pp, m)
        assert passes(order) == every(SPLIT, m)
        assert most_live(order) == min(pp, m)


@given(sizes)
def test_zb_v_holds_two_chunks_where_1f1b_holds_a_stage(size):
    pp, m = size
    for rank in range(pp):
        order = zero_bubble_v(rank, pp, m)
        assert passes(order) == every(SPLIT, m, 2)
        assert most_live(order) <= min(2 * pp, 2 * m)


def span(schedule, pp, m, chunks, costs) -> float:
    """Time from the first forward to the last pass of a stage."""
    layers = pp * chunks
    plan = Plan().with_(
        {
            "parallel.schedule": schedule, "parallel.pp": pp, "parallel.microbatches": m, "parallel.chunks": chunks,
            "model.language.layers": layers, "data.global_batch": m,
        }
    )  # fmt: skip
    plan.check().raise_if_any()
    timed = [each for ops in simulate(plan.schedule(), plan, costs) for each in ops if each.op.kind in costs]
    return max(each.end for each in timed) - min(each.start for each in timed)


@pytest.mark.parametrize(("pp", "m"), [(1, 3), (2, 3), (2, 8), (3, 5), (3, 9), (4, 7), (4, 16)])
def test_the_bubbles_are_those_of_the_papers(pp, m):
    """In units of a pass through a rank's whole share: F = B = W, so 1F1B's backward takes two."""
    whole, split = {"forward": 1.0, "backward": 2.0}, dict.fromkeys(SPLIT, 1.0)
    assert span("1f1b", pp, m, 1, whole) == pytest.approx(3 * m + 3 * (pp - 1))
    assert span("zb_h1", pp, m, 1, split) == pytest.approx(3 * m + (pp - 1))
    halves = dict.fromkeys(SPLIT, 0.5)
    assert span("zb_v", pp, m, 2, halves) == pytest.approx(3 * m + (pp - 1) / 2)
    for chunks in (2, 3):
        if m % pp == 0:
            parts = {kind: cost / chunks for kind, cost in whole.items()}
            assert span("interleaved", pp, m, chunks, parts) == pytest.approx(3 * m + 3 * (pp - 1) / chunks)


def test_stages_are_held_in_a_round_or_in_a_v():
    layers = tuple(range(i, i + 1) for i in range(6))
    assert Stages(3, 2, False, layers).holders == ((0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1))
    folded = Stages(3, 2, True, layers)
    assert folded.holders == ((0, 0), (1, 0), (2, 0), (2, 1), (1, 1), (0, 1))
    assert folded.last_pp == 0
    assert [folded.of(pp) for pp in range(3)] == [[0, 5], [1, 4], [2, 3]]


def test_blocks_are_split_evenly_or_as_given():
    assert even_split(10, 4) == (3, 3, 2, 2)
    plan = Plan().with_("parallel.pp=2", "parallel.schedule=zb_v", "model.language.layers=7")
    assert plan.layout().layers_of(0) == [range(2), range(6, 7)]
    given_ = plan.with_("parallel.layers_per_stage=[1, 3, 2, 1]")
    assert given_.layout().layers_of(0) == [range(1), range(6, 7)]
    assert given_.layout().layers_of(1) == [range(1, 4), range(4, 6)]
