"""Which ranks hold each module, how many have a copy of its parameters, and whether they share them out (ZeRO)."""

from __future__ import annotations

from mmlab.plan.schema import Plan


def beside_encoder(plan: Plan, module: str) -> bool:
    """Whether the ranks that encode compute a module: the encoder itself, and the projector where it lives beside."""
    return module == "vision" or (module == "projector" and plan.parallel.projector == "vision")


def shared(plan: Plan, module: str) -> bool:
    """Whether the plan asks to share a module (vision, projector, language) out over the ranks that hold it.

    zero1 and zero2 share out what training adds, so a frozen module stays whole with them.
    """
    p = plan.parallel
    if p.sharding == "none" or getattr(plan.sharding, module) == "whole":
        return False
    return p.sharding == "zero3" or not getattr(plan.train, module).frozen


def holders(plan: Plan, module: str) -> int:
    """Ranks that hold a copy of the same parameters of a module and see different data."""
    p = plan.parallel
    if not beside_encoder(plan, module):
        return p.dp * p.cp
    return {"own_ranks": p.vision_dp, "first_stage": p.dp * p.cp * p.tp, "all_ranks": plan.world_size}[p.vision]
