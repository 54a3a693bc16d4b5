"""How evenly a step's work is spread: what ranks wait for each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mmlab.data.manifest import StepManifest


def balance(manifest: StepManifest) -> dict[str, Any]:
    """A step's balance, each number largest over mean, 1 when all have the same.

    `tokens`: over the microbatches of all replicas; `images`: tiles over the ranks that encode (null without images).
    With a bucket window `unbucketed` has both for the samples that the step would have without one, dealt in order,
    and `total`, their tokens. `over`: tokens by which the fullest microbatch is over the token budget, where it is.
    """
    told: dict[str, Any] = _spread(manifest)
    split = manifest.split
    if manifest.unbucketed:
        in_order = replace(split, even=False, budget=0)
        plain = StepManifest(manifest.step, manifest.unbucketed, in_order)
        told["unbucketed"] = _spread(plain) | {"total": plain.tokens}
    over = max(_tokens(manifest)) - split.budget
    return told | ({"over": over} if split.budget and over > 0 else {})


def _spread(manifest: StepManifest) -> dict[str, float | None]:
    tiles = [sum(manifest.samples[i].tiles for i in manifest.owned(o)) for o in range(manifest.split.owners)]
    return {"tokens": _largest_over_mean(_tokens(manifest)), "images": _largest_over_mean(tiles)}


def _tokens(manifest: StepManifest) -> list[int]:
    """Tokens of each microbatch of each replica."""
    split, samples = manifest.split, manifest.samples
    return [
        sum(samples[i].length for i in manifest.microbatch(dp, m))
        for m in range(split.microbatches)
        for dp in range(split.dp)
    ]


def _largest_over_mean(loads: Sequence[int]) -> float | None:
    total = sum(loads)
    return round(max(loads) * len(loads) / total, 4) if total else None
