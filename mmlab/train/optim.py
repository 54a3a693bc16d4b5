"""AdamW with a learning rate, weight decay, warm-up and cosine for each module (Loshchilov & Hutter 2019)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from mmlab.parallel.gradients import Trained
from mmlab.plan.schema import MODULES, ModuleTrain, Plan


def learning_rate(settings: ModuleTrain, step: int, steps: int) -> float:
    """Learning rate of step `step` (1 is the first) of a run of `steps`: linear warm-up, then a cosine.

    The cosine falls from the base at the end of the warm-up to min_lr_ratio x base at the last step (and stays).
    """
    if step <= settings.warmup_steps:
        return settings.lr * step / settings.warmup_steps
    span = max(1, steps - settings.warmup_steps)
    share = min(1.0, (step - settings.warmup_steps - 1) / max(1, span - 1))
    cosine = 0.5 * (1.0 + math.cos(math.pi * share))
    return settings.lr * (settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * cosine)


def decays(shape_dims: int) -> bool:
    """Whether a parameter takes part in weight decay: matrices do, biases and norms (1-D) do not."""
    return shape_dims >= 2


def learning_rates(plan: Plan, step: int) -> dict[str, float]:
    """Learning rate of each module at a step."""
    return {m: learning_rate(getattr(plan.train, m), step, plan.train.steps) for m in MODULES}


class Optimizer:
    """torch's fused AdamW over the plain local tensors of one rank's parameters.

    DTensor dispatch would cost more than the update itself: "plain tensors compute" (design, decision 5). A rank with
    nothing to train owns no optimizer.
    """

    def __init__(self, plan: Plan, trained: list[Trained]) -> None:
        self.trained = trained
        groups = []
        for module in MODULES:
            settings: ModuleTrain = getattr(plan.train, module)
            for decay in (True, False):
                values = [t.value for t in trained if t.module == module and decays(t.value.dim()) == decay]
                if values:
                    groups.append(
                        {"params": values, "module": module, "decay": decay, "lr": settings.lr,
                         "betas": (settings.beta1, settings.beta2), "eps": settings.eps, "weight_decay": 0.0}
                    )  # fmt: skip
        self.adamw = torch.optim.AdamW(groups, fused=True) if groups else None
        if self.adamw is not None:
            for t in trained:  # made now rather than at the first step, so that a checkpoint can load into it
                self.adamw.state[t.value] = {
                    "step": torch.zeros((), dtype=torch.float32, device=t.value.device),
                    "exp_avg": torch.zeros_like(t.value),
                    "exp_avg_sq": torch.zeros_like(t.value),
                }

    def step(self, plan: Plan, step: int, grads: Mapping[str, Tensor]) -> dict[str, float]:
        """Apply the gradients of a step and return the learning rates used."""
        rates = learning_rates(plan, step)
        if self.adamw is not None:
            for group in self.adamw.param_groups:
                settings: ModuleTrain = getattr(plan.train, group["module"])
                group["lr"] = rates[group["module"]]
                group["weight_decay"] = settings.weight_decay if group["decay"] else 0.0
            for t in self.trained:
                t.value.grad = grads[t.name]
            self.adamw.step()
        return rates

    def state(self, t: Trained) -> dict[str, Tensor]:
        """The optimizer's tensors of one parameter: step (scalar), exp_avg and exp_avg_sq (local shape)."""
        assert self.adamw is not None
        found: dict[str, Tensor] = self.adamw.state[t.value]
        return found
