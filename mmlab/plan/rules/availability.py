"""Values that the schema knows and this version cannot run yet."""

from __future__ import annotations

from collections.abc import Iterator

from mmlab.plan.keys import get
from mmlab.plan.problems import Fix, Problem
from mmlab.plan.schema import Plan

AVAILABLE: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("communication.vision.compressor", ("none", "bf16", "fp16", "int8", "topk", "onebit")),
    ("communication.language.compressor", ("none", "bf16", "fp16", "int8", "topk", "onebit")),
)
"""Fields of which this version has only some values, the value nearest to what was asked for first."""


def available(plan: Plan) -> Iterator[Problem]:
    """Values that the schema knows and this version cannot run yet."""
    for field, values in AVAILABLE:
        value = get(plan, field)
        if value not in values:
            shown = str(values[0]).lower() if isinstance(values[0], bool) else values[0]
            asked = str(value).lower() if isinstance(value, bool) else value
            fix = Fix(f"use {shown}", (f"{field}={shown}",))
            yield Problem(field, f"{asked} is not available in this version.", fix)
