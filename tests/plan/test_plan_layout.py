import itertools

import pytest
from hypothesis import given
from plan_strategies import placed_plans

from mmlab.plan import Layout, Plan
from mmlab.plan.sizes import rank_share


@given(placed_plans())
def test_every_rank_has_one_place_and_every_place_one_rank(plan):
    layout, p = Layout(plan), plan.parallel
    assert layout.world_size == plan.world_size
    assert [place.rank for place in layout.places] == list(range(plan.world_size))
    encoders = {"own_ranks": p.vision_dp, "first_stage": p.dp * p.cp * p.tp, "all_ranks": plan.world_size}[p.vision]
    assert [layout.place(rank).vision for rank in layout.vision_ranks] == list(range(encoders))
    assert sum(place.vision >= 0 for place in layout.places) == encoders
    seen = set()
    for pp, dp, cp, tp in itertools.product(range(p.pp), range(p.dp), range(p.cp), range(p.tp)):
        rank = layout.rank_of(pp=pp, dp=dp, cp=cp, tp=tp)
        place = layout.place(rank)
        assert (place.role, place.pp, place.dp, place.cp, place.tp) == ("language", pp, dp, cp, tp)
        assert rank in layout.stage_ranks(pp)
        seen.add(rank)
    assert seen == set(range(p.vision_dp, plan.world_size))
    replicas = [layout.token_ranks(dp) for dp in range(p.dp)]
    assert sorted(itertools.chain(*replicas)) == layout.stage_ranks(0)
    assert len({place.label for place in layout.places}) == plan.world_size


@given(placed_plans())
def test_groups_partition_the_language_ranks(plan):
    layout, p = Layout(plan), plan.parallel
    language = list(range(layout.first, plan.world_size))
    sizes = ((layout.tp_groups, p.tp), (layout.dp_groups, p.dp), (layout.cp_groups, p.cp), (layout.pipelines, p.pp))
    for groups, size in sizes:
        assert sorted(itertools.chain(*groups)) == language
        assert {len(group) for group in groups} == {size}
    for axis, groups in (("tp", layout.tp_groups), ("dp", layout.dp_groups), ("pp", layout.pipelines)):
        for group in groups:
            assert [getattr(layout.place(rank), axis) for rank in group] == list(range(len(group)))
    ends = [(layout.place(a).pp, layout.place(b).pp) for a, b in layout.embedding_groups]
    folded = p.schedule == "zb_v"  # its first rank holds both ends of the model
    assert ends == ([(0, p.pp - 1)] * (p.dp * p.cp * p.tp) if p.pp > 1 and not folded else [])


@given(placed_plans())
def test_nodes_hold_what_fits_and_never_split_a_tensor_group(plan):
    layout, room = Layout(plan), plan.cluster.ranks_per_node
    assert list(itertools.chain(*layout.nodes)) == list(range(plan.world_size))
    assert all(len(ranks) <= (room or plan.world_size) for ranks in layout.nodes)
    for group in layout.tp_groups:
        assert len({layout.place(rank).node for rank in group}) == 1
    beside = [*range(layout.first), *layout.tp_groups[0]]
    assert {layout.place(rank).node for rank in beside} == {0}


@given(placed_plans())
def test_every_decoder_layer_lies_on_one_stage(plan):
    layout, p = Layout(plan), plan.parallel
    held = [blocks for pp in range(p.pp) for blocks in layout.layers_of(pp)]
    assert sorted(itertools.chain(*held)) == list(range(plan.model.language.layers))
    sizes = [len(blocks) for blocks in layout.stages.layers]
    assert list(itertools.chain(*layout.stages.layers)) == list(range(plan.model.language.layers))
    assert sizes == list(p.layers_per_stage) if p.layers_per_stage else max(sizes) - min(sizes) <= 1


def test_the_quickstart_is_numbered_as_documented():
    layout = Plan.preset("quickstart").layout()
    labels = ["vision 0", "vision 1", "stage 0 tp 0", "stage 0 tp 1", "stage 1 tp 0", "stage 1 tp 1"]
    assert [place.label for place in layout.places] == labels
    assert layout.vision_group == [0, 1]
    assert layout.tp_groups == [[2, 3], [4, 5]]
    assert layout.pipelines == layout.embedding_groups == [[2, 4], [3, 5]]
    assert layout.dp_groups == [[2], [3], [4], [5]]


def test_a_tensor_group_moves_to_the_next_node():
    plan = Plan().with_({"parallel.vision_dp": 1, "parallel.tp": 2, "parallel.pp": 3, "cluster.ranks_per_node": 4})
    assert plan.layout().nodes == [[0, 1, 2], [3, 4, 5, 6]]


def test_coordinates_outside_the_grid_are_refused():
    layout = Plan.preset("quickstart").layout()
    for bad in ({"pp": 2}, {"pp": 0, "tp": 2}, {"pp": 0, "dp": -1}):
        with pytest.raises(IndexError):
            layout.rank_of(**bad)
    for rank in (-1, 6):
        with pytest.raises(IndexError):
            layout.place(rank)


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        ("compressor=topk", True),
        ("compressor=bf16", False),
        ("error_feedback=false", False),
        ("compressor=onebit", True),
    ],
)
def test_what_error_feedback_keeps_is_in_a_ranks_memory(change, kept):
    plan = Plan.preset("laptop").with_(
        "parallel.dp=2", "communication.language.compressor=int8", f"communication.language.{change}"
    )
    layout = plan.layout()
    shares = [rank_share(plan, layout, place) for place in layout.places]
    language = [share for share, place in zip(shares, layout.places, strict=True) if place.role == "language"]
    assert all(share.residual_bytes == (4 * share.trained if kept else 0) for share in language)
    assert ("left out" in str(layout)) == kept
    scaled = plan.with_("precision.vision=fp16")  # any overflow takes the whole step back: both residuals are held
    share = rank_share(scaled, scaled.layout(), layout.places[-1])
    assert share.residual_bytes == (8 * share.trained if kept else 0)
    alone = plan.with_("parallel.dp=1")
    assert "left out" not in str(alone.layout())  # nobody to reduce with
