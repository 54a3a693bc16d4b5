"""Low-rank adapters (LoRA, Hu et al. 2021): which linear layers have one and how large they are, from a plan alone.

Beside a frozen weight W [O, I] two factors train, A [r, I] and B [O, r]: the layer computes W x + (alpha / r) B A x.
"""

from __future__ import annotations

from collections.abc import Mapping

from mmlab.plan.schema import ModuleTrain, Plan

LINEAR: Mapping[str, tuple[str, ...]] = {
    "vision": ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"),
    "projector": ("linear_1", "linear_2"),
    "language": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
}
"""The linear layers of each module by the last part of their names: of a block, or (projector) of the module.

Embeddings and the output layer are none of them: what a tied table learns would have to be merged twice.
"""
ROW_PARALLEL = frozenset({"o_proj", "down_proj"})
"""Layers of the decoder whose input tensor parallelism splits: A is split there and B whole; elsewhere B is split."""
ALL = "all"
"""The target that stands for all linear layers of a module."""


def settings(plan: Plan, module: str) -> ModuleTrain:
    """The optimizer section of a module."""
    found: ModuleTrain = getattr(plan.train, module)
    return found


def targets(plan: Plan, module: str) -> tuple[str, ...]:
    """The layers of a module that have an adapter, in the order of LINEAR; none without LoRA."""
    own = settings(plan, module)
    if own.lora_rank == 0:
        return ()
    return tuple(name for name in LINEAR[module] if ALL in own.lora_targets or name in own.lora_targets)


def scale(plan: Plan, module: str) -> float:
    """alpha / r: what B A x is multiplied by."""
    own = settings(plan, module)
    return own.lora_alpha / own.lora_rank


def shapes(plan: Plan, module: str) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of each linear layer of a module, by the last part of its name."""
    vision, language = plan.model.vision, plan.model.language
    if module == "vision":
        square = dict.fromkeys(LINEAR["vision"][:4], (vision.hidden, vision.hidden))
        return square | {"fc1": (vision.mlp_width, vision.hidden), "fc2": (vision.hidden, vision.mlp_width)}
    if module == "projector":
        width = plan.model.projector.hidden or language.hidden
        return {"linear_1": (width, vision.hidden), "linear_2": (language.hidden, width)}
    kv, mlp = language.kv_heads * language.head_dim, language.mlp_width
    return {
        "q_proj": (language.hidden, language.hidden),
        "k_proj": (kv, language.hidden),
        "v_proj": (kv, language.hidden),
        "o_proj": (language.hidden, language.hidden),
        "gate_proj": (mlp, language.hidden),
        "up_proj": (mlp, language.hidden),
        "down_proj": (language.hidden, mlp),
    }


def parameters(plan: Plan, module: str, tp: int = 1) -> int:
    """Elements of the adapters of one block (projector: of the module) on one of `tp` tensor ranks."""
    rank, layers = settings(plan, module).lora_rank, shapes(plan, module)
    total = 0
    for name in targets(plan, module):
        out, inp = layers[name]
        split, whole = (inp, out) if name in ROW_PARALLEL else (out, inp)
        total += rank * (split // tp + whole)
    return total
