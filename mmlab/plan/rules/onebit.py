"""What 1-bit Adam cannot be combined with, and how long it must wait before its second moment stays."""

from __future__ import annotations

from collections.abc import Iterator

from mmlab.plan.problems import Fix, Problem
from mmlab.plan.schema import MODULES, Plan


def _native(plan: Plan) -> bool:
    return plan.train.optimizer == "onebit_adam" and plan.parallel.engine == "native"


def clipping(plan: Plan) -> Iterator[Problem]:
    """Gradients are clipped by their global norm, which 1-bit Adam never has."""
    if _native(plan) and plan.train.clip_norm:
        message = (
            f"clip_norm {plan.train.clip_norm:g} with onebit_adam: after freeze_step ranks sum first moments; no rank "
            "knows the norm of the gradient before it is part of them."
        )
        yield Problem("train.clip_norm", message, Fix("do not clip", ("train.clip_norm=0",)))


def whole_moments(plan: Plan) -> Iterator[Problem]:
    """Every rank adds its share of the first moment, which it must have whole."""
    asked = plan.parallel.sharding
    if _native(plan) and asked != "none":
        reason = {
            "zero1": "with zero1 a rank has its own rows of it alone",
            "zero2": "zero2 sums gradients inside backward, before they could be made part of it",
            "zero3": "zero3 sums gradients inside backward, before they could be made part of it",
        }[asked]
        message = f"onebit_adam needs the whole first moment on every rank; {reason}."
        yield Problem("parallel.sharding", message, Fix("share nothing out", ("parallel.sharding=none",)))


def freeze(plan: Plan) -> Iterator[Problem]:
    """The second moment has something in it when it stays, and stays before the run ends."""
    t = plan.train
    if not _native(plan):
        return
    adapters = any(getattr(t, module).lora_rank for module in MODULES)
    least = 2 if adapters else 1
    if t.freeze_step < least:
        message = (
            "LoRA's A has no gradient at the first step, because B begins at zero: a second moment that stays after "
            "it would keep A as it is."
        )
        yield Problem("train.freeze_step", message, Fix("wait a step more", (f"train.freeze_step={least}",)))
    elif t.freeze_step >= t.steps:
        message = f"a run of {t.steps} steps is over before freeze_step {t.freeze_step}: it would be AdamW throughout."
        if t.steps > least:
            step = max(least, t.steps // 5)
            fix = Fix("take a fifth of the steps, or train longer", (f"train.freeze_step={step}",))
        else:
            fix = Fix("use AdamW", ("train.optimizer=adamw",))
        yield Problem("train.freeze_step", message, fix)
