"""A plan against the number of engines there are."""

from __future__ import annotations

from collections.abc import Iterator

from mmlab.plan.keys import get
from mmlab.plan.problems import Fix, Problem
from mmlab.plan.schema import Plan


def engine_count(plan: Plan, engines: int) -> Iterator[Problem]:
    """The plan needs no more ranks than there are engines."""
    if plan.world_size <= engines:
        return
    there = f"there are {engines} engines" if engines != 1 else "there is 1 engine"
    message = f"the plan needs {plan.world_size} ranks, but {there}."
    best = _fit(plan, engines)
    if best is None:
        least = 2 if plan.parallel.vision == "own_ranks" else 1
        yield Problem("parallel", message, Fix(f"start at least {least} engines"))
        return
    changed = [key for key, value in best.items() if get(plan, key) != value]
    overrides = tuple(f"{key}={str(best[key]).lower()}" for key in changed)
    yield Problem(changed[0], message, Fix(f"start {plan.world_size} engines, or use fewer ranks", overrides))


def _fit(plan: Plan, engines: int) -> dict[str, int] | None:
    """Degrees, none above the plan's, that use the most of `engines` ranks; dp and encoder ranks give way first."""
    p = plan.parallel
    own = p.vision_dp if p.vision == "own_ranks" else 0
    candidates = [
        (vision + dp * pp * cp * tp, pp, tp, cp, vision, dp)
        for dp in range(1, p.dp + 1)
        if p.dp % dp == 0
        for vision in (range(1, own + 1) if own else (0,))
        for pp in range(1, p.pp + 1)
        for tp in range(1, p.tp + 1)
        if p.tp % tp == 0
        for cp in range(1, p.cp + 1)
        if p.cp % cp == 0
    ]
    fitting = [candidate for candidate in candidates if candidate[0] <= engines]
    if not fitting:
        return None
    _, pp, tp, cp, vision, dp = max(fitting)
    sp = p.sp and tp > 1
    degrees = {"dp": dp, "vision_dp": vision, "pp": pp, "tp": tp, "cp": cp, "sp": sp}
    return {f"parallel.{key}": value for key, value in degrees.items() if key != "vision_dp" or own}
