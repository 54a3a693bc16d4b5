"""How evenly the work of a run's steps was spread, in a sentence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from mmlab.tracking.tables import WINDOW, mean

if TYPE_CHECKING:
    from mmlab.plan import Plan

NOTICED = 1.1
"""Largest over mean from which a bucket window is proposed: a tenth of the others' time is then spent waiting."""


def spread(plan: Plan, steps: Iterable[Mapping[str, Any]]) -> str:
    """What the last steps tell of it, before and after buckets; empty where there is nothing to spread."""
    told = [step for step in steps if step.get("balance")][-WINDOW:]
    now = _of([step["balance"] for step in told])
    if not now:
        return ""
    text = f"Work of a step, largest over mean: {_words(now)}"
    before = [step["balance"]["unbucketed"] for step in told if "unbucketed" in step["balance"]]
    if before:
        text += f"; without data.bucket_window {_words(_of(before))}"
        totals = [step["tokens"] for step in told if "unbucketed" in step["balance"]]
        plain = [entry["total"] for entry in before]
        text += f". Tokens of a step, largest over mean: {_over(totals):.2f}; without {_over(plain):.2f}"
    elif max(now.values()) > NOTICED and not plan.data.bucket_window:
        text += f". data.bucket_window={8 * plan.data.global_batch} would deal samples by their work"
    over = [step["balance"]["over"] for step in told if "over" in step["balance"]]
    if over:
        text += f". {len(over)} of {len(told)} steps were over data.token_budget, by up to {max(over)} tokens"
    return text + "."


def _of(entries: list[Mapping[str, Any]]) -> dict[str, float]:
    """The mean of each number that is known; none where all have one part only."""
    found = {key: [e[key] for e in entries if e.get(key) is not None] for key in ("tokens", "images")}
    means = {key: mean(values) for key, values in found.items() if values}
    return means if any(value > 1 for value in means.values()) else {}


def _words(numbers: Mapping[str, float]) -> str:
    names = {"tokens": "{:.2f} in tokens of microbatches", "images": "{:.2f} in tiles of encoding ranks"}
    return " and ".join(names[key].format(value) for key, value in numbers.items()) or "1.00"


def _over(values: list[int]) -> float:
    return max(values) / mean(values)
