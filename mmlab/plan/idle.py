"""Fields that have no effect as the plan stands, and when they would have one."""

from __future__ import annotations

from collections.abc import Iterator

from mmlab.plan.compression import GROUPS, OPTIONS
from mmlab.plan.schema import MODULES, Plan

_MODULE = ("lr", "weight_decay", "beta1", "beta2", "eps", "warmup_steps", "min_lr_ratio")


def idle_fields(plan: Plan) -> dict[str, str]:
    """Dotted keys without effect, each with the condition under which it would have one, in words."""
    return {key: when for when, keys in _conditions(plan) for key in keys}


def _conditions(plan: Plan) -> Iterator[tuple[str, list[str]]]:
    p, train = plan.parallel, plan.train
    if p.cp == 1:
        yield "with cp above 1", ["parallel.cp_mode", "parallel.cp_scope"]
    if p.pp == 1:
        yield "with pp above 1", ["parallel.balance"]
    if p.sharding == "none":
        yield (
            'with parallel.sharding other than "none"',
            [f"sharding.{name}" for name in ("vision", "projector", "language", "reduce")],
        )
    if not plan.precision.scales_loss:
        yield "with a module in fp16", ["precision.loss_scale_power", "precision.loss_scale_window"]
    if plan.offload.mode != "nvme":
        yield 'with offload.mode = "nvme"', ["offload.nvme_path"]
    if train.optimizer != "onebit_adam":
        yield 'with train.optimizer = "onebit_adam"', ["train.freeze_step"]
    if plan.data.max_tiles == 1:
        yield "with data.max_tiles above 1", ["data.thumbnail"]
    if not plan.data.sources:
        yield "with data.sources", ["data.weights"]
    else:
        yield "without data.sources", ["data.path"]
    if not train.eval_samples:
        yield "with train.eval_samples above 0", ["train.eval_every", "train.sample_images"]
    yield from _of_modules(plan)
    yield from _of_compressors(plan)


def _of_modules(plan: Plan) -> Iterator[tuple[str, list[str]]]:
    for module in MODULES:
        section = getattr(plan.train, module)
        if section.frozen:
            yield "while it is not frozen", [f"train.{module}.{name}" for name in _MODULE]
        if not section.lora_rank:
            yield "with lora_rank above 0", [f"train.{module}.lora_alpha", f"train.{module}.lora_targets"]


def _of_compressors(plan: Plan) -> Iterator[tuple[str, list[str]]]:
    options = sorted({option for some in OPTIONS.values() for option in some})
    for group in GROUPS:
        chosen = getattr(plan.communication, group).compressor
        for option in options:
            if option not in OPTIONS[chosen]:
                having = ", ".join(name for name, some in OPTIONS.items() if option in some)
                yield f"with compressor {having}", [f"communication.{group}.{option}"]
