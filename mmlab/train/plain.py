"""The reference: the same plan, seed and data on one process, without any parallel code.

Deliberately simple: the whole batch in one pack, torch's own AdamW (not fused)
and clipping, 1-bit Adam as its formula. What a layout computes must agree with this.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mmlab.data.pipeline import DataSource
from mmlab.models.build import PartModel, plain_model
from mmlab.models.weights import init_from
from mmlab.plan.schema import Plan
from mmlab.train.optim import decays, learning_rates
from mmlab.train.precision import LossScale, master_dtype


@dataclass
class StepRecord:
    """What one step gave: loss, gradients before clipping (after 1-bit Adam's freeze: first moments) and weights after
    the update, all by global name."""

    loss: float
    grads: dict[str, Tensor] = field(default_factory=dict)
    params: dict[str, Tensor] = field(default_factory=dict)


def _optimizer(plan: Plan, model: PartModel) -> torch.optim.AdamW:
    groups = []
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        settings = getattr(plan.train, name.split(".", 1)[0])
        decay = settings.weight_decay if decays(param.dim()) else 0.0
        betas = (settings.beta1, settings.beta2)
        groups.append({"params": [param], "name": name, "weight_decay": decay, "betas": betas, "eps": settings.eps})
    return torch.optim.AdamW(groups, foreach=False)


def _gradients(trainable: list[tuple[str, torch.nn.Parameter]], scale: float) -> dict[str, Tensor]:
    """The gradients, freed of the loss scale in place; zero without any image: weight decay and momentum apply."""
    grads = {}
    for name, param in trainable:
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        grads[name] = param.grad.div_(scale)
    return grads


def _frozen_update(optimizer: torch.optim.AdamW, step: int) -> dict[str, Tensor]:
    """1-bit Adam after its freeze, on one rank: the second moment and its count stay. Returns the first moments."""
    momenta = {}
    with torch.no_grad():
        for group in optimizer.param_groups:
            (param,), (beta1, beta2) = group["params"], group["betas"]
            state = optimizer.state[param]
            state["exp_avg"] = beta1 * state["exp_avg"] + (1 - beta1) * param.grad
            second = state["exp_avg_sq"] / (1 - beta2 ** int(state["step"]))
            first = state["exp_avg"] / (1 - beta1**step)
            direction = torch.where(second > 0, first / (second.sqrt() + group["eps"]), 0.0)
            param -= group["lr"] * (direction + group["weight_decay"] * param)
            momenta[group["name"]] = state["exp_avg"]
    return momenta


def run_plain(plan: Plan, steps: int) -> list[StepRecord]:
    """Train `steps` steps on one process in the plan's precision; every tensor of every step is kept."""
    model = plain_model(plan, master_dtype(plan))
    init_from(model, plan)
    source = DataSource(plan)
    optimizer = _optimizer(plan, model)
    trainable = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    cursors, records, scale = source.start(), [], LossScale(plan)
    for step in range(1, steps + 1):
        manifest, cursors = source.manifest(step, cursors)
        everyone = range(len(manifest.samples))
        pixels, bad = source.pixels(manifest, everyone)
        text = source.text(manifest, everyone, frozenset(bad))
        targets = max(1, manifest.targets(frozenset(bad)))
        overflow = True
        while overflow:  # fp16: the same batch with a smaller scale
            loss = model(text, pixels) / targets
            optimizer.zero_grad()
            (loss * scale.value).backward()
            grads = _gradients(trainable, scale.value)
            overflow = scale.judge(all(bool(grad.isfinite().all()) for grad in grads.values()))
        record = StepRecord(float(loss.detach()), {name: grad.clone() for name, grad in grads.items()})
        if plan.train.clip_norm:
            torch.nn.utils.clip_grad_norm_([param for _, param in trainable], plan.train.clip_norm, foreach=False)
        rates = learning_rates(plan, step)
        for group in optimizer.param_groups:
            group["lr"] = rates[group["name"].split(".", 1)[0]]
        if plan.train.reduces_momentum(step):
            record.grads = _frozen_update(optimizer, step)
        else:
            optimizer.step()
        record.params = {name: param.detach().clone() for name, param in model.named_parameters()}
        records.append(record)
    source.close()
    return records
