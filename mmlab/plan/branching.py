"""A new run that goes on from a checkpoint of another one: what may differ from the plan that saved it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mmlab.errors import PlanError
from mmlab.plan import lora
from mmlab.plan.keys import get, known_keys, live_keys
from mmlab.plan.plan import Plan
from mmlab.plan.schema import MODULES


def branched(saved: Plan, step: int, *changes: Plan | str | Path | Mapping[str, Any]) -> Plan:
    """The plan of a run that goes on from step `step` of a checkpoint that `saved` has made: a whole plan (or its path
    or preset) first, or changes to the saved one, such as "parallel.tp=2" or "train.language.lr=1e-4".

    The layout, the training and most of the data may be others; the model, its adapters and what a place in the data
    means may not. PlanError with each reason, and where the new plan has problems.
    """
    whole = Plan.named(changes[0]) if changes else None
    new = saved.with_(*changes) if whole is None else whole.with_(*changes[1:])  # type: ignore[arg-type]
    lines = list(_refusals(saved, new))
    if lines:
        raise PlanError("\n  ".join(["a branch keeps the model and the order of the data:", *lines]))
    if new.train.steps <= step:
        last = f"train.steps = {new.train.steps}: the checkpoint is of step {step}, so nothing is left to train"
        raise PlanError(f"{last}; set train.steps={step + max(1, saved.train.steps)} or so")
    new.check().raise_if_any()
    return new


def _refusals(saved: Plan, new: Plan) -> Iterator[str]:
    for key in (key for key in known_keys() if key.startswith("model.")):
        if get(saved, key) != get(new, key):
            yield f"{key} stays {get(saved, key)!r}, not {get(new, key)!r}: the weights would be another model's"
    if saved.data.lanes != new.data.lanes:
        yield f"data.lanes stays {saved.data.lanes}, not {new.data.lanes}: it says what a place in the data means"
    if saved.data.seed != new.data.seed:
        yield f"data.seed stays {saved.data.seed}, not {new.data.seed}: a place in the data would be in another order"
    if len(saved.data.sources) != len(new.data.sources):
        yield f"data.sources stay {len(saved.data.sources)}, not {len(new.data.sources)}: each has its own place"
    if bool(saved.data.text_share) != bool(new.data.text_share):
        yield f"data.text_share stays {saved.data.text_share:g}: text and pictures are in one order or in two"
    for module in MODULES:
        old, own = lora.targets(saved, module), lora.settings(new, module)
        lost = sorted(set(old) - set(lora.targets(new, module)))
        if lost:
            yield f"train.{module}.lora_targets lacks {', '.join(lost)}: what adapters have learned would be lost"
        elif old and (own.lora_rank, own.lora_alpha) != (lora.settings(saved, module).lora_rank,
                                                         lora.settings(saved, module).lora_alpha):  # fmt: skip
            before = lora.settings(saved, module)
            yield (f"train.{module}.lora_rank and lora_alpha stay {before.lora_rank} and {before.lora_alpha:g}: the "
                   "adapters would be others")  # fmt: skip


def live_as(saved: Plan, new: Plan) -> Plan:
    """The plan of a checkpoint with the values of a new one in the fields that a restore takes over from it."""
    return saved.with_({key: get(new, key) for key in live_keys()})
