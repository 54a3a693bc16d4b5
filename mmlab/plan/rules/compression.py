"""What cannot compress gradients that zero2 and zero3 sum inside backward, each rank its own rows."""

from __future__ import annotations

from collections.abc import Iterator

from mmlab.plan.holders import beside_encoder, shared
from mmlab.plan.problems import Fix, Problem
from mmlab.plan.schema import MODULES, GroupCommunication, Plan


def _shared_out(plan: Plan) -> Iterator[tuple[str, str, GroupCommunication]]:
    """(side, module, settings) of each module whose gradients FSDP2 sums; one module for each side."""
    p = plan.parallel
    if p.engine != "native" or p.sharding not in ("zero2", "zero3"):
        return
    sides: dict[str, str] = {}
    for module in MODULES:
        if shared(plan, module) and not getattr(plan.train, module).frozen:
            sides.setdefault("vision" if beside_encoder(plan, module) else "language", module)
    for side, module in sides.items():
        yield side, module, getattr(plan.communication, side)


def whole_matrices(plan: Plan) -> Iterator[Problem]:
    """PowerSGD's factors are of whole matrices."""
    for side, module, settings in _shared_out(plan):
        if settings.compressor == "powersgd":
            field, other = f"communication.{side}.compressor", "int8" if plan.parallel.sharding == "zero2" else "bf16"
            message = (
                f"powersgd has factors of whole matrices, which every rank needs to put the sum together; with "
                f"{plan.parallel.sharding} a rank is sent its own rows of the {module} module's alone."
            )
            yield Problem(field, message, Fix(f"use {other}", (f"{field}={other}",)))


def shared_residuals(plan: Plan) -> Iterator[Problem]:
    """zero3 keeps nothing whole, residuals neither."""
    for side, module, settings in _shared_out(plan):
        if not settings.keeps_residual or settings.compressor == "powersgd" or plan.parallel.sharding != "zero3":
            continue
        message = (
            f"{settings.compressor} with error feedback keeps one number for each parameter of the {module} module on "
            "every rank, as much as the weights that zero3 shares out."
        )
        if settings.compressor == "int8":
            field = f"communication.{side}.error_feedback"
            yield Problem(field, message, Fix("do without, int8 loses little", (f"{field}=false",)))
        else:
            field = f"communication.{side}.compressor"
            yield Problem(field, message, Fix("use bf16, which needs none", (f"{field}=bf16",)))
