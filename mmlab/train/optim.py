"""AdamW with a learning rate, weight decay, warm-up and cosine for each module (Loshchilov & Hutter 2019)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mmlab.parallel.buckets import Trained
from mmlab.parallel.gradients import Share
from mmlab.parallel.sharding import RowGather, ShardGroup
from mmlab.plan.schema import MODULES, ModuleTrain, Plan

GATHER_BYTES = 25e6
"""Updated weights that zero1 gathers in one collective, at most; as many bytes are needed besides."""


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


def parameter_groups(plan: Plan, named: Iterable[tuple[str, Tensor]]) -> list[dict[str, Any]]:
    """AdamW's groups of (module, parameter or part of one): one for each module and for what decays and what does not,
    with the module's name and whether it decays. The decay itself comes with each step."""
    found = list(named)
    groups = []
    for module in MODULES:
        settings: ModuleTrain = getattr(plan.train, module)
        for decay in (True, False):
            params = [value for of, value in found if of == module and decays(value.dim()) == decay]
            if params:
                groups.append(
                    {"params": params, "module": module, "decay": decay, "lr": settings.lr,
                     "betas": (settings.beta1, settings.beta2), "eps": settings.eps, "weight_decay": 0.0}
                )  # fmt: skip
    return groups


class Optimizer:
    """torch's fused AdamW over the plain local tensors of one rank's parameters.

    DTensor dispatch would cost more than the update itself: "plain tensors compute" (design, decision 5). A rank with
    nothing to train owns no optimizer. With zero1 a rank updates and keeps the state of its own rows of the modules in
    `shards`, and gathers the others'.
    """

    def __init__(self, plan: Plan, trained: list[Trained], shards: Mapping[str, ShardGroup] | None = None) -> None:
        self.trained = trained
        self.shards = shards if shards is not None and plan.parallel.sharding == "zero1" else {}
        self.values = {t.name: self._mine(t, t.value) for t in trained}
        self.gathers = [
            RowGather([t.value for t in trained if t.module == module], group, GATHER_BYTES)
            for module, group in self.shards.items()
        ]
        groups = parameter_groups(plan, ((t.module, self.values[t.name]) for t in trained))
        self.adamw = torch.optim.AdamW(groups, fused=True) if groups else None
        if self.adamw is not None:
            for t in trained:  # made now rather than at the first step, so that a checkpoint can load into it
                value = self.values[t.name]
                self.adamw.state[value] = {
                    "step": torch.zeros((), dtype=torch.float32, device=value.device),
                    "exp_avg": torch.zeros_like(value),
                    "exp_avg_sq": torch.zeros_like(value),
                }

    def _mine(self, t: Trained, whole: Tensor) -> Tensor:
        """What this rank updates of a parameter (or of its gradient): all, with zero1 its rows."""
        shards = self.shards.get(t.module)
        return whole if shards is None else whole[slice(*shards.rows(len(whole)))]

    def step(self, plan: Plan, step: int, grads: Mapping[str, Tensor]) -> dict[str, float]:
        """Apply the gradients of a step and return the learning rates used."""
        rates = learning_rates(plan, step)
        if self.adamw is not None:
            for group in self.adamw.param_groups:
                settings: ModuleTrain = getattr(plan.train, group["module"])
                group["lr"] = rates[group["module"]]
                group["weight_decay"] = settings.weight_decay if group["decay"] else 0.0
            for t in self.trained:
                self.values[t.name].grad = self._mine(t, grads[t.name])
            self.adamw.step()
            self.adamw.zero_grad()  # sharded gradients are made anew in each step; nobody keeps the old ones
        for gather in self.gathers:
            gather()
        return rates

    def sharing(self, plan: Plan, step: int) -> Share | None:
        """What the reducer is to make of gradients before it sums them; nothing: gradients are what is summed."""
        return None

    def state(self, t: Trained) -> dict[str, Tensor]:
        """The optimizer's tensors of one parameter: step (scalar), exp_avg and exp_avg_sq.

        The moments share storage with the live ones and are DTensors where each rank has a part of them, placed as the
        parameter is, with zero1 by rows besides.
        """
        assert self.adamw is not None
        live: dict[str, Tensor] = self.adamw.state[self.values[t.name]]
        return {key: value if value.dim() == 0 else self._placed(t, value) for key, value in live.items()}

    def _placed(self, t: Trained, moment: Tensor) -> Tensor:
        shards, param = self.shards.get(t.module), t.param
        if shards is not None:
            return shards.placed(param, moment)
        if not isinstance(param, DTensor):
            return moment
        return DTensor.from_local(moment, param.device_mesh, param.placements, shape=param.shape, stride=param.stride())
