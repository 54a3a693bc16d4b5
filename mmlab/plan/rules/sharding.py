"""What `parallel.sharding` and [sharding] may ask for."""

from __future__ import annotations

from collections.abc import Iterator

from mmlab.plan.holders import holders, shared
from mmlab.plan.problems import Fix, Problem
from mmlab.plan.schema import MODULES, Plan


def something_is_shared(plan: Plan) -> Iterator[Problem]:
    """ZeRO shares something out."""
    asked = plan.parallel.sharding
    if asked != "none" and all(getattr(plan.sharding, module) == "whole" for module in MODULES):
        message = f"{asked} with every module whole shares nothing out."
        yield Problem("sharding.language", message, Fix("share the decoder", ("sharding.language=layer",)))


def several_holders(plan: Plan) -> Iterator[Problem]:
    """A module that is shared out is held by two ranks or more."""
    if plan.parallel.engine != "native":
        return
    alone = [module for module in MODULES if shared(plan, module) and holders(plan, module) == 1]
    rest = [module for module in MODULES if shared(plan, module) and holders(plan, module) > 1]
    for module in alone:
        need = "dp x cp" if module == "language" or plan.parallel.vision != "own_ranks" else "parallel.vision_dp"
        message = f"nobody to share the {module} module with: {need} is 1."
        if rest:
            yield Problem(f"sharding.{module}", message, Fix("keep it whole", (f"sharding.{module}=whole",)))
        else:
            yield Problem("parallel.sharding", message, Fix("share nothing out", ("parallel.sharding=none",)))
            return
