"""What DeepSpeed is told about a plan: which modules it holds, and its JSON with a reason for each value.

ZeRO-3 (Rajbhandari et al. 2020) keeps a parameter whole on every rank if it has at most
`stage3_param_persistence_threshold` elements. The advice to set that to 1e5 "so that the encoder stays resident" does
nothing for it: a ViT-L matrix has 1 to 4 million elements. Here the threshold comes from the model's own sizes, and
where none separates a module from the language model, that module stays outside of DeepSpeed altogether: whole, reduced
and updated by mmlab. No torch, no deepspeed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from mmlab.plan.schema import MODULES, Plan

KEPT_WHOLE = ("vision", "projector")
"""Modules that stay whole on every rank, whatever the sharding."""
SMALL = 100_000
"""DeepSpeed's own threshold: norms and biases are not worth a gather."""


def stage(plan: Plan) -> int:
    """The ZeRO stage of `parallel.sharding`, 0 for none."""
    return {"none": 0, "zero1": 1, "zero2": 2, "zero3": 3}[plan.parallel.sharding]


def largest_parameter(plan: Plan, module: str) -> int:
    """Elements of the largest parameter of vision or projector."""
    v, width = plan.model.vision, plan.model.projector.hidden or plan.model.language.hidden
    if module == "projector":
        return max(width * v.hidden, plan.model.language.hidden * width)
    positions = v.tokens_per_tile + (v.family == "clip")
    return max(3 * v.patch_size**2, positions, v.hidden, v.mlp_width) * v.hidden


def smallest_matrix(plan: Plan) -> int:
    """Elements of the smallest matrix of the language model: what sharding is for begins here."""
    c = plan.model.language
    return min(c.hidden, c.kv_heads * c.head_dim, c.mlp_width, c.vocab_size) * c.hidden


def separable(plan: Plan, module: str) -> bool:
    """Whether a threshold keeps all of vision or projector whole and no matrix of the language model."""
    return largest_parameter(plan, module) < smallest_matrix(plan)


def outside(plan: Plan) -> tuple[str, ...]:
    """Modules that DeepSpeed does not hold: mmlab keeps them whole, reduces their gradients and updates them.

    With offload all that must not leave the device (DeepSpeed offloads the optimizer state of all that it holds or of
    nothing), with ZeRO-3 what no threshold separates.
    """
    if plan.offload.mode != "none":
        return KEPT_WHOLE
    return tuple(m for m in KEPT_WHOLE if stage(plan) == 3 and not separable(plan, m))


def inside(plan: Plan) -> tuple[str, ...]:
    """Modules that DeepSpeed holds."""
    return tuple(m for m in MODULES if m not in outside(plan))


def reduces_once(plan: Plan) -> bool:
    """Whether ZeRO-2 and 3 keep gradients whole over the microbatches of a step and reduce them once
    (`sharding.reduce`); ZeRO-1 always does, by itself."""
    return stage(plan) > 1 and plan.parallel.microbatches > 1 and plan.sharding.reduce == "step"


def persistence_threshold(plan: Plan) -> int:
    """Elements up to which ZeRO-3 keeps a parameter whole."""
    kept = [largest_parameter(plan, m) for m in KEPT_WHOLE if m in inside(plan)]
    return max(kept) if kept else min(SMALL, smallest_matrix(plan) - 1)


@dataclass(frozen=True)
class Setting:
    """One value of DeepSpeed's JSON: its dotted key, the value, and why it is so."""

    key: str
    value: Any
    reason: str


def _batch(plan: Plan) -> list[Setting]:
    t = plan.train.language
    sizes = "data.global_batch = dp x microbatches x microbatch size"
    return [
        Setting("train_batch_size", plan.data.global_batch, sizes),
        Setting("train_micro_batch_size_per_gpu", plan.microbatch_size, sizes),
        Setting("gradient_accumulation_steps", plan.parallel.microbatches, "parallel.microbatches"),
        Setting(
            "gradient_clipping", 0.0,
            "off (the default is 1.0!): mmlab clips by train.clip_norm, which may change while a run goes on; "
            "elsewhere put train.clip_norm here",
        ),
        Setting("optimizer.type", "AdamW", "each module's own rates, betas and decay come as parameter groups"),
        Setting("optimizer.params.lr", t.lr, "train.language.lr; set anew at every step"),
        Setting("optimizer.params.betas", [t.beta1, t.beta2], "train.language.beta1, beta2"),
        Setting("optimizer.params.eps", t.eps, "train.language.eps"),
        Setting("optimizer.params.weight_decay", t.weight_decay, "train.language.weight_decay (matrices)"),
        Setting("optimizer.params.torch_adam", True, "torch's AdamW: DeepSpeed's own is compiled, for minutes"),
        Setting("optimizer.params.fused", True, "torch's fused update, as with engine = native"),
    ]  # fmt: skip


def _zero(plan: Plan) -> list[Setting]:
    zero, number = "zero_optimization.", stage(plan)
    elements = int(plan.communication.language.bucket_mb * 1e6 / 4)
    bucket = "communication.language.bucket_mb in elements of 4 bytes (the default, 5e8, is a buffer of 2 GB)"
    settings = [
        Setting(zero + "stage", number, f"parallel.sharding = {plan.parallel.sharding}"),
        Setting(zero + "reduce_bucket_size", elements, bucket),
        Setting(zero + "overlap_comm", False, "every rank reduces in the order of the parameters"),
    ]
    if number < 3:
        settings.append(Setting(zero + "allgather_bucket_size", elements, bucket))
    if number == 2:
        reason = "ranks whose samples have no image give zero gradients, so none is unused; belongs to stage 2 only"
        settings.append(Setting(zero + "ignore_unused_parameters", False, reason))
    if number == 3:
        settings += [
            Setting(zero + "stage3_param_persistence_threshold", persistence_threshold(plan), threshold_reason(plan)),
            Setting(zero + "stage3_prefetch_bucket_size", elements, bucket),
            Setting(zero + "memory_efficient_linear", False, "it would replace torch's linear for the whole process"),
        ]
    return settings


def threshold_reason(plan: Plan) -> str:
    """Why the persistence threshold is what it is, with the numbers."""
    matrix = smallest_matrix(plan)
    sizes = {m: largest_parameter(plan, m) for m in KEPT_WHOLE}
    kept = [m for m in KEPT_WHOLE if m in inside(plan)]
    parts = []
    if kept:
        names = " and ".join(f"{m} ({sizes[m]:,})" for m in kept)
        parts.append(f"elements: the largest parameter of {names}; the language model's smallest matrix has {matrix:,}")
    for module in (m for m in KEPT_WHOLE if m not in kept):
        why = "offload" if separable(plan, module) else "no threshold separates it from the language model"
        parts.append(
            f"{module} stays outside of DeepSpeed, whole ({why}; its largest parameter has {sizes[module]:,} elements, "
            f"the language model's smallest matrix {matrix:,})"
        )
    return "; ".join(parts)


def _offload(plan: Plan) -> list[Setting]:
    mode, zero = plan.offload.mode, "zero_optimization."
    if mode == "none":
        return []
    device = "nvme" if mode == "nvme" else "cpu"
    force = "torch's AdamW updates on the host; DeepSpeed's own would be compiled at first use (minutes)"
    settings = [
        Setting("zero_force_ds_cpu_optimizer", False, force),
        Setting(zero + "offload_optimizer.device", device, f"offload.mode = {mode}"),
    ]
    targets = ["offload_optimizer"]
    if mode != "optimizer":
        targets.append("offload_param")
        settings.append(Setting(zero + "offload_param.device", device, f"offload.mode = {mode}; language model only"))
    for target in targets:
        if mode == "nvme":
            settings.append(Setting(f"{zero}{target}.nvme_path", plan.offload.nvme_path, "offload.nvme_path"))
        pinned = "page-locked host memory: transfers overlap with computing on CUDA; nothing to lock on CPU"
        settings.append(Setting(f"{zero}{target}.pin_memory", plan.cluster.device != "cpu", pinned))
    return settings


def settings(plan: Plan) -> list[Setting]:
    """Every value of the JSON in order, with its reason."""
    return _batch(plan) + _zero(plan) + _offload(plan)


def config(plan: Plan) -> dict[str, Any]:
    """DeepSpeed's JSON for a plan, as a dict."""
    found: dict[str, Any] = {}
    for setting in settings(plan):
        *path, last = setting.key.split(".")
        section = found
        for part in path:
            section = section.setdefault(part, {})
        section[last] = setting.value
    return found


def commented(plan: Plan) -> str:
    """The JSON with the reason of each value behind it (`//` comments, as JSON5 and JSONC have them)."""
    reasons = {s.key: s.reason for s in settings(plan)}
    return "\n".join(_lines(config(plan), reasons, "", 1, "{", "}"))


def _lines(values: dict[str, Any], reasons: dict[str, str], prefix: str, depth: int, begin: str, end: str) -> list[str]:
    pad = "  " * depth
    lines = [begin]
    for number, (key, value) in enumerate(values.items(), 1):
        comma = "," if number < len(values) else ""
        if isinstance(value, dict):
            opening, closing = f"{pad}{json.dumps(key)}: {{", f"{pad}}}{comma}"
            lines += _lines(value, reasons, f"{prefix}{key}.", depth + 1, opening, closing)
        else:
            lines.append(f"{pad}{json.dumps(key)}: {json.dumps(value)}{comma}  // {reasons[prefix + key]}")
    return [*lines, end]
