"""Routes of image tokens: every row arrives where it is needed, once, and its gradient comes back, once."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mmlab.data.manifest import ManifestSample, Split, StepManifest
from mmlab.data.pipeline import DataSource
from mmlab.data.tiling import Grid
from mmlab.plan import Layout, Plan
from mmlab.train.tokens import Route


@st.composite
def routes(draw):
    """A route of one microbatch with 0 to 5 tiles a sample, under any placement, transfer and context parallelism."""
    placement = draw(st.sampled_from(("own_ranks", "first_stage", "all_ranks")))
    dp, m = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    plan = Plan().with_(
        {
            "parallel.vision": placement,
            "parallel.vision_dp": draw(st.integers(1, 3)) if placement == "own_ranks" else 0,
            "parallel.dp": dp,
            "parallel.tp": draw(st.integers(1, 4)),
            "parallel.cp": draw(st.integers(1, 2)),
            "parallel.pp": draw(st.integers(1, 2)),
            "parallel.microbatches": m,
            "parallel.transfer": draw(st.sampled_from(("p2p", "all_gather"))),
            "model.vision.image_size": 16 * draw(st.integers(1, 3)),
        }
    )
    size = dp * m * draw(st.integers(1, 4))
    tiles = draw(st.lists(st.integers(0, 5), min_size=size, max_size=size))
    samples = tuple(ManifestSample(str(i), 0, i, 0, 0, 9, 3, (Grid(n),) * (n > 0)) for i, n in enumerate(tiles))
    manifest = StepManifest(1, samples, Split.of(plan))
    layout = Layout(plan)
    return Route(layout, manifest, draw(st.integers(0, dp - 1)), draw(st.integers(0, m - 1)))


def rows(route, pieces):
    return Counter(route.index(pieces).tolist())


@given(routes())
def test_every_rank_of_the_first_stage_has_every_row_once(route):
    p, every = route.layout.plan.parallel, Counter(range(route.total))
    for cp in range(p.cp):
        received = [rows(route, route.incoming(cp, tp)) for tp in range(p.tp)]
        if p.transfer == "p2p":
            assert all(found == every for found in received)
        else:
            assert sum(received, Counter()) == every
            inside = {at for owner, at in route._inside(cp).items()}
            outside = sum(len(r) for o, r in route.rows.items() if o not in route._inside(cp))
            cut = [
                found.total() - sum(len(route.rows[o]) for o, at in route._inside(cp).items() if at == tp)
                for tp, found in enumerate(received)
            ]
            assert max(cut) - min(cut) <= 1  # what comes from outside is cut evenly
            assert sum(cut) == outside
            assert inside <= set(range(p.tp))


@given(routes())
def test_every_gradient_goes_back_once_from_each_context_rank(route):
    p = route.layout.plan.parallel
    for cp in range(p.cp):
        assert sum((rows(route, route.outgoing(cp, tp)) for tp in range(p.tp)), Counter()) == Counter(
            range(route.total)
        )


@given(routes())
def test_both_sides_name_the_same_transfers_and_a_pair_of_ranks_has_one(route):
    layout, p = route.layout, route.layout.plan.parallel
    for pieces_of, of_owner in ((route.incoming, route.receivers), (route.outgoing, route.returners)):
        stage = [
            (layout.vision_ranks[piece.owner], layout.rank_of(pp=0, dp=route.replica, cp=cp, tp=tp), piece)
            for cp in range(p.cp)
            for tp in range(p.tp)
            for piece in pieces_of(cp, tp)
        ]
        encoders = [
            (layout.vision_ranks[owner], rank, piece) for owner in route.rows for rank, piece in of_owner(owner)
        ]
        assert sorted(stage) == sorted(encoders)
        assert all(count == 1 for count in Counter((a, b) for a, b, _ in stage).values())


@given(routes())
def test_a_rank_that_encodes_and_stages_keeps_its_own_rows(route):
    """Such rows travel to nobody else with all_gather, and their gradients never travel inside a tensor group."""
    layout, p = route.layout, route.layout.plan.parallel
    for cp in range(p.cp):
        for owner, tp in route._inside(cp).items():
            mine = layout.rank_of(pp=0, dp=route.replica, cp=cp, tp=tp)
            group = {layout.rank_of(pp=0, dp=route.replica, cp=cp, tp=t) for t in range(p.tp)}
            assert layout.vision_ranks[owner] == mine
            assert [rank for rank, _ in route.returners(owner) if rank in group] == [mine]
            if p.transfer == "all_gather":
                assert [rank for rank, _ in route.receivers(owner) if rank in group] == [mine]


ONE_STAGE = ("parallel.vision_dp=0", "parallel.pp=1")
BYTES = [  # rows of image tokens that travel, in multiples of the images' own
    (("parallel.vision=first_stage", "parallel.dp=2", *ONE_STAGE), 0),
    (("parallel.vision=first_stage", "parallel.tp=2", *ONE_STAGE), 1),  # each row to one other rank, no gradient
    (("parallel.vision=all_ranks", "parallel.dp=2", "data.global_batch=4", *ONE_STAGE), 0),
    (("parallel.vision_dp=2", "parallel.tp=2", "parallel.pp=1"), 3),  # to two ranks, gradient from one
    (("parallel.vision_dp=2", "parallel.tp=2", "parallel.pp=1", "parallel.transfer=all_gather"), 3),  # half a row twice
]


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "times"), BYTES)
def test_what_a_rank_encodes_for_itself_does_not_travel(pool, shards, changes, times):
    plan = Plan.load("laptop").with_({"data.path": str(shards), "data.held_out": ""}, *changes)
    pool.grow(plan.world_size)
    source = DataSource(plan)
    cursors = source.start()
    for step, result in enumerate(
        pool.run("train_functions:step_results", plan.dumps(), 2, ranks=plan.world_size)[0], start=1
    ):
        manifest, cursors = source.manifest(step, cursors)
        row = plan.model.language.hidden * 4
        wanted = times * manifest.tiles * plan.model.vision.tokens_per_tile * row
        assert sum(result["traffic"].get("tokens", [])) == wanted
    source.close()
