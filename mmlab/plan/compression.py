"""Which options each compressor of gradients has, and the live values that stand for a choice of one."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, get_args

from mmlab.errors import PlanError
from mmlab.plan.io import set_live
from mmlab.plan.plan import Plan
from mmlab.plan.problems import Problems
from mmlab.plan.section import Compressor

COMPRESSORS: tuple[str, ...] = get_args(Compressor)
"""Names of all compressors."""
GROUPS = ("vision", "language")
"""The module groups whose gradients are reduced each in its own way; "all" means both."""
OPTIONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "none": (),
        "bf16": (),
        "fp16": (),
        "int8": ("error_feedback",),
        "topk": ("ratio", "error_feedback"),
        "powersgd": ("rank", "warm_start", "min_compression_rate", "error_feedback"),
        "onebit": ("error_feedback",),
    }
)
"""Fields of a group's section that say how each compressor codes."""
SHARED = ("residual", "warmup_steps")
"""Fields that go with any compressor: what becomes of residuals when it changes, steps without it at the start."""


def live_values(group: str, compressor: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The live values, by dotted key, that choose a compressor and options of it for a group ("all" for both).

    PlanError on an unknown group or compressor, and on an option that the compressor does not have.
    """
    if group not in (*GROUPS, "all"):
        projector = " (the projector goes with the side that computes it)" if group == "projector" else ""
        raise PlanError(f"{group!r} is not a group whose gradients are compressed: vision, language or all{projector}")
    if compressor not in COMPRESSORS:
        near = difflib.get_close_matches(str(compressor), COMPRESSORS, 1, 0.0)[0]
        raise PlanError(
            f"unknown compressor {compressor!r}; the nearest known one is {near} of {', '.join(COMPRESSORS)}"
        )
    known = (*OPTIONS[compressor], *SHARED)
    for option in options:
        if option not in known:
            raise PlanError(f"{compressor} has no option {option}; it has {', '.join(known)}")
    groups = GROUPS if group == "all" else (group,)
    return {
        f"communication.{g}.{key}": value
        for g in groups
        for key, value in {"compressor": compressor, **options}.items()
    }


def checked(plan: Plan, values: Mapping[str, Any]) -> Plan:
    """A copy of the plan with live fields changed, as `set_live` makes it, that the rules admit.

    PlanError also where a rule refuses what the plan becomes (not for what was wrong with it before).
    """
    changed = set_live(plan, values)
    before = {str(problem) for problem in plan.check()}
    Problems(changed, [problem for problem in changed.check() if str(problem) not in before]).raise_if_any()
    return changed
