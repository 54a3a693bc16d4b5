"""Shapes of the model that no layout can compute."""

from __future__ import annotations

from collections.abc import Iterator

from mmlab.plan.problems import Fix, Problem
from mmlab.plan.rules.common import divisor
from mmlab.plan.schema import Plan


def image_patches(plan: Plan) -> Iterator[Problem]:
    """Whole patches."""
    v = plan.model.vision
    if v.image_size % v.patch_size:
        size = max(1, round(v.image_size / v.patch_size)) * v.patch_size
        message = f"{v.image_size} pixels are not a multiple of patch_size {v.patch_size}."
        fix = Fix("use the nearest multiple", (f"model.vision.image_size={size}",))
        yield Problem("model.vision.image_size", message, fix)


def vision_heads(plan: Plan) -> Iterator[Problem]:
    """Encoder heads of equal width."""
    v = plan.model.vision
    if v.hidden % v.heads:
        message = f"{v.heads} heads do not divide hidden {v.hidden}."
        fix = Fix("use a divisor", (f"model.vision.heads={divisor(v.heads, v.hidden)}",))
        yield Problem("model.vision.heads", message, fix)


def language_heads(plan: Plan) -> Iterator[Problem]:
    """Decoder heads of equal, even width (rotary embedding turns pairs), shared evenly by key/value heads."""
    c = plan.model.language
    if c.hidden % (2 * c.heads):
        heads = divisor(c.heads, c.hidden // 2) if c.hidden % 2 == 0 else 0
        odd = f"{c.heads} heads do not split hidden {c.hidden} into heads of an even width."
        overrides = (f"model.language.heads={heads}", f"model.language.kv_heads={divisor(c.kv_heads, heads)}")
        width = -(-c.hidden // (2 * c.heads)) * 2 * c.heads
        fix = Fix("use a divisor", overrides) if heads else Fix("widen it", (f"model.language.hidden={width}",))
        yield Problem("model.language.heads" if heads else "model.language.hidden", odd, fix)
    elif c.heads % c.kv_heads:
        message = f"{c.kv_heads} key/value heads do not divide {c.heads} heads."
        fix = Fix("use a divisor", (f"model.language.kv_heads={divisor(c.kv_heads, c.heads)}",))
        yield Problem("model.language.kv_heads", message, fix)
