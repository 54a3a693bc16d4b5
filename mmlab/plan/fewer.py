"""A plan's layout on fewer ranks, for a run that has lost some: the same model, data and global batch."""

from __future__ import annotations

from collections.abc import Iterator

from mmlab.plan.plan import Plan


def fewer(plan: Plan, ranks: int) -> Plan | None:
    """The largest layout on at most `ranks` ranks that a smaller dp or vision_dp leads to; None without one.

    Microbatches stay at most as large as they were, so that memory for activations does too: there are more of them.
    """
    p = plan.parallel
    encoders = range(p.vision_dp, 0, -1) if p.vision == "own_ranks" else (p.vision_dp,)
    found = [plan.with_({"parallel.dp": dp, "parallel.vision_dp": v}) for dp in range(p.dp, 0, -1) for v in encoders]
    fits = [smaller for smaller in found if smaller.world_size <= min(ranks, plan.world_size - 1)]
    for smaller in sorted(fits, key=lambda one: (-one.world_size, -one.parallel.dp)):
        for changed in _microbatches(plan, smaller):
            if not list(changed.check()):
                return changed
    return None


def _microbatches(plan: Plan, smaller: Plan) -> Iterator[Plan]:
    """A layout with as many microbatches as keep them as small as in the plan, the fewest first."""
    batch, dp = plan.data.global_batch, smaller.parallel.dp
    for count in range(plan.parallel.microbatches, batch // dp + 1):
        if batch % (dp * count) == 0 and batch // (dp * count) <= plan.microbatch_size:
            yield smaller.with_({"parallel.microbatches": count})
