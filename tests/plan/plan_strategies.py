"""Plans at random, small enough to play every schedule."""

from hypothesis import strategies as st

from mmlab.plan import Plan


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    dp, pp, m = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    schedule = draw(st.sampled_from(("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v")))
    chunks = {"interleaved": draw(st.integers(2, 3)), "zb_v": 2}.get(schedule, 1)
    m = -(-m // pp) * pp if schedule == "interleaved" else m
    layers = draw(st.lists(st.integers(1, 3), min_size=pp * chunks, max_size=pp * chunks))
    placement = draw(st.sampled_from(("own_ranks", "own_ranks", "first_stage", "all_ranks")))
    frozen = draw(st.booleans())
    ahead = draw(st.integers(0, 2)) if frozen and placement == "own_ranks" else 0
    return Plan().with_(
        {
            "parallel.encoder_ahead": ahead,
            "parallel.vision": placement,
            "parallel.vision_dp": draw(st.integers(1, 3)) if placement == "own_ranks" else 0,
            "parallel.encoder_batch": draw(st.integers(1, m)),
            "parallel.transfer": draw(st.sampled_from(("p2p", "all_gather"))),
            "parallel.dp": dp,
            "parallel.tp": draw(st.sampled_from((1, 2, 4))),
            "parallel.pp": pp,
            "parallel.microbatches": m,
            "parallel.schedule": schedule,
            "parallel.chunks": draw(st.sampled_from((chunks, 0 if chunks < 3 else chunks))),
            "parallel.layers_per_stage": draw(st.sampled_from((layers, []))),
            "parallel.projector": draw(st.sampled_from(("vision", "first_stage"))),
            "data.global_batch": dp * m * draw(st.integers(1, 3)),
            "model.language.layers": sum(layers),
            "model.language.tied_embeddings": draw(st.booleans()),
            "train.vision.frozen": frozen,
            "train.projector.frozen": draw(st.booleans()),
            "train.language.frozen": draw(st.booleans()),
        }
    )


@st.composite
def placed_plans(draw: st.DrawFn) -> Plan:
    """Plans on nodes on which their tensor groups, and the encoder beside the first one, fit; cp too."""
    plan = draw(plans())
    p = plan.parallel
    room = draw(st.one_of(st.just(0), st.integers(p.vision_dp + p.tp, p.vision_dp + p.tp + 9)))
    return plan.with_({"cluster.ranks_per_node": room, "parallel.cp": draw(st.integers(1, 2))})
