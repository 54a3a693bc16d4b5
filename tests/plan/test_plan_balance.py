"""The split that follows from measured times is the best there is."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from mmlab.plan import Plan
from mmlab.plan.balance import LayerTimes, balanced_split, rank_seconds, report
from mmlab.plan.stages import stages_of

seconds = st.floats(0.0, 5.0)


@given(
    st.sampled_from((("1f1b", 2, 0), ("1f1b", 3, 0), ("zb_v", 2, 0), ("interleaved", 2, 2), ("interleaved", 2, 3))),
    st.integers(0, 4),
    st.builds(LayerTimes, st.floats(0.1, 2.0), seconds, seconds, seconds, seconds),
)
def test_no_other_split_has_a_faster_slowest_rank(pipeline, more, times):
    schedule, pp, chunks = pipeline
    plan = Plan().with_({"parallel.schedule": schedule, "parallel.pp": pp, "parallel.chunks": chunks})
    stages = stages_of(plan)
    layers = stages.count + more
    plan = plan.with_({"model.language.layers": layers})
    chosen = balanced_split(plan, times)
    assert sum(chosen) == layers
    assert min(chosen) >= 1
    slowest = max(rank_seconds(times, stages, chosen))
    for sizes in product(range(1, more + 2), repeat=stages.count):
        if sum(sizes) == layers:
            assert slowest <= max(rank_seconds(times, stages, sizes)) + 1e-9


def test_a_costly_head_takes_blocks_from_its_rank():
    plan = Plan().with_("parallel.pp=2", "model.language.layers=8")
    assert balanced_split(plan, LayerTimes(1.0, 0.0, 0.0)) == (4, 4)
    assert balanced_split(plan, LayerTimes(1.0, 0.0, 4.0)) == (6, 2)
    assert balanced_split(plan, LayerTimes(1.0, 0.0, 0.0, encoder=2.0)) == (3, 5)
    said = report(plan, LayerTimes(1.0, 0.0, 4.0))
    assert (said["seconds"], said["even"]) == ([6.0, 6.0], [4.0, 8.0])


def test_a_v_has_both_ends_on_the_first_rank():
    plan = Plan().with_("parallel.pp=2", "parallel.schedule=zb_v", "model.language.layers=8")
    sizes = balanced_split(plan, LayerTimes(1.0, 1.0, 3.0))
    assert sizes[0] + sizes[3] == 2
    assert sizes[1] + sizes[2] == 6


def test_only_a_pipeline_without_a_given_split_is_measured():
    plan = Plan().with_("parallel.balance=measured", "parallel.pp=2")
    assert plan.parallel.undecided
    assert not plan.with_("parallel.layers_per_stage=[3, 1]").parallel.undecided
    assert not plan.with_("parallel.pp=1").parallel.undecided
    assert not plan.with_("parallel.balance=even").parallel.undecided
