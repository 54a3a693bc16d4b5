"""Rules for LoRA."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from mmlab.plan import lora
from mmlab.plan.problems import Fix, Problem
from mmlab.plan.schema import MODULES, Plan


def _listed(names: list[str]) -> str:
    return "[" + ", ".join(f'"{name}"' for name in names) + "]"


def lora_targets(plan: Plan) -> Iterator[Problem]:
    """Adapters have layers to stand beside, and only ones that the module has."""
    for module in MODULES:
        own, field = lora.settings(plan, module), f"train.{module}.lora_targets"
        if own.lora_rank == 0:
            continue
        if not own.lora_targets:
            fix = Fix("adapt all linear layers", (f'{field}=["{lora.ALL}"]',))
            yield Problem(field, f"rank {own.lora_rank}, but no layer is named: nothing would be trained.", fix)
        known = (*lora.LINEAR[module], lora.ALL)
        unknown = [name for name in own.lora_targets if name not in known]
        if unknown:
            nearest = {name: difflib.get_close_matches(name, known, 1, 0.0)[0] for name in unknown}
            names = list(dict.fromkeys(nearest.get(name, name) for name in own.lora_targets))
            message = f"{module} has no linear layer {', '.join(unknown)}; it has {', '.join(lora.LINEAR[module])}."
            yield Problem(field, message, Fix("use the nearest", (f"{field}={_listed(names)}",)))


def lora_rank(plan: Plan) -> Iterator[Problem]:
    """A rank above the smaller side of a weight has more parameters than the weight and nothing to gain."""
    for module in MODULES:
        own, field = lora.settings(plan, module), f"train.{module}.lora_rank"
        sides = {name: min(lora.shapes(plan, module)[name]) for name in lora.targets(plan, module)}
        smallest = min(sides.values(), default=own.lora_rank)
        if own.lora_rank > smallest:
            name = min(sides, key=lambda found: sides[found])
            message = f"rank {own.lora_rank} is above the smaller side of {module}'s {name}, {smallest}."
            yield Problem(field, message, Fix("use at most that", (f"{field}={smallest}",)))


def lora_frozen(plan: Plan) -> Iterator[Problem]:
    """Frozen means that nothing of a module trains; with LoRA its weights are frozen anyway."""
    for module in MODULES:
        own = lora.settings(plan, module)
        if own.frozen and own.lora_rank:
            message = f"{module} is frozen, but lora_rank {own.lora_rank} asks for adapters that train beside it."
            fix = Fix("let the adapters train (the weights stay)", (f"train.{module}.frozen=false",))
            yield Problem(f"train.{module}.frozen", message, fix)
