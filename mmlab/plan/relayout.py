"""Another layout for a run that goes on: what may differ from the running plan, and why the rest may not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmlab.errors import PlanError
from mmlab.plan.keys import known_keys
from mmlab.plan.plan import Plan
from mmlab.plan.problems import Problems

FREE = frozenset({"data.workers", "data.max_bad_share", "data.token_budget", "train.activation_checkpointing"})
"""Fields of the refused sections that change neither the samples nor what is learned from them."""
REASONS: Mapping[str, str] = {
    "name": "it is part of the folder's name",
    "model": "the weights would be another model's",
    "data": "the samples or their order would be others",
    "train": "it would be another training",
    "cluster.profile": "the lab has the engines of another one",
}
"""What stays as it is, by section or field, and why."""


def _refusal(key: str) -> str:
    """Why a field cannot change; empty when it can."""
    if key in FREE or known_keys()[key].live:
        return ""
    return next((why for part, why in REASONS.items() if key == part or key.startswith(f"{part}.")), "")


def differences(before: Plan, after: Plan) -> dict[str, Any]:
    """The fields in which a plan differs from another one, by dotted key, as JSON has them."""
    return {c.key: list(c.after) if isinstance(c.after, tuple) else c.after for c in before.diff(after)}


def relaid(plan: Plan, changes: Mapping[str, Any]) -> Plan:
    """The plan with another layout, by dotted keys; a split of the decoder that was measured is measured anew.

    PlanError where nothing differs, where a difference would make it another run (each with the reason), and where the
    new plan has problems.
    """
    new = plan.with_(dict(changes))
    old_pipe, pipe = plan.parallel, new.parallel
    stages = old_pipe.pp * old_pipe.chunks_per_rank != pipe.pp * pipe.chunks_per_rank
    if stages and pipe.balance == "measured" and pipe.layers_per_stage == old_pipe.layers_per_stage:
        new = new.with_({"parallel.layers_per_stage": []})
    found = plan.diff(new)
    if not found:
        raise PlanError("there is nothing to change: this is the plan that the run goes by")
    refused = [(change, why) for change in found if (why := _refusal(change.key))]
    if refused:
        lines = [f"{c.key} stays {c.before!r}, it cannot become {c.after!r}: {why}" for c, why in refused]
        raise PlanError("\n  ".join(["a run that goes on keeps its model, its data and its training:", *lines]))
    Problems(new, new.check()).raise_if_any()
    return new
