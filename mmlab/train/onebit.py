"""1-bit Adam (Tang et al. 2021, "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence
Speed", algorithm 1): AdamW whose second moment stays after a while, so that first moments can be summed compressed.

Adam divides by a root of squared gradients, so what compression leaves out cannot be made good later. Once the divisor
stays as it is, the update is linear in the gradients, and error feedback works as it does for SGD with momentum.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import torch
from torch import Tensor

from mmlab.parallel.buckets import Bucket, Trained
from mmlab.parallel.gradients import Share
from mmlab.plan.schema import ModuleTrain, Plan
from mmlab.train.optim import Optimizer, decays, learning_rates


class OnebitAdam(Optimizer):
    """AdamW up to `train.freeze_step`, 1-bit Adam from then on.

    After the freeze each of R ranks turns its gradients g_i into its share of the new first moment,
    m_i = beta1 m / R + (1 - beta1) g_i; the group's reduction sums those, through the group's compressor and error
    feedback, and the sum is the first moment of all ranks. The paper averages moments of mean gradients; here gradients
    are summed (design, decision 7), so moments are too. The update is w -= lr (m^ / (sqrt(v^) + eps) + decay w).

    Bias correction: the paper's algorithm has none, in either phase. AdamW corrects both moments, and so that the
    freeze makes no jump, m^ = m / (1 - beta1^step) goes on and v^ = v / (1 - beta2^n) has the n of the freeze; a
    parameter's `step` in checkpoints counts the updates of its second moment and stands still with it.

    An element whose second moment is zero at the freeze never had a gradient (the row of a token that was not seen,
    the adapters' A before B has moved): nothing says how far it may go, and m / eps would throw it out of the model.
    It keeps its value, but for decay; DeepSpeed has users give a mask for the same reason.

    Args:
        plan: the plan; whatever is not live in it holds throughout.
        trained: what trains on this rank.
        copies: names of tied copies, whose shares are summed with those of the ones that count: they add no m.
    """

    def __init__(self, plan: Plan, trained: list[Trained], copies: Collection[str] = ()) -> None:
        super().__init__(plan, trained)
        self.copies = frozenset(copies)
        self._betas = {t.module: _settings(plan, t).beta1 for t in trained}

    def sharing(self, plan: Plan, step: int) -> Share | None:
        """After the freeze: gradients become shares of the first moment."""
        return self.share if plan.train.reduces_momentum(step) else None

    def share(self, bucket: Bucket, ranks: int, unit: float) -> None:
        """Turn a bucket's gradients, `unit` times the real ones, into this rank's share of the first moment, of which
        `ranks` ranks have one each, in the same unit."""
        assert self.adamw is not None
        beta1 = self._betas[bucket.module]
        bucket.flat.mul_(1.0 - beta1)
        shares, moments = [], []
        for name, share in bucket.views():
            if name not in self.copies:
                shares.append(share)
                moments.append(self.adamw.state[self.values[name]]["exp_avg"])
        if shares:
            torch._foreach_add_(shares, moments, alpha=beta1 * unit / ranks)

    def step(self, plan: Plan, step: int, grads: Mapping[str, Tensor]) -> dict[str, float]:
        """Apply what a step has summed, gradients or first moments; returns the learning rates used."""
        if not plan.train.reduces_momentum(step):
            return super().step(plan, step, grads)
        rates = learning_rates(plan, step)
        for t in self.trained:
            self._update(t, _settings(plan, t), rates[t.module], step, grads[t.name])
        return rates

    @torch.no_grad()
    def _update(self, t: Trained, settings: ModuleTrain, rate: float, step: int, moment: Tensor) -> None:
        assert self.adamw is not None
        weight = self.values[t.name]
        state = self.adamw.state[weight]
        first, second = state["exp_avg"].copy_(moment), state["exp_avg_sq"]
        corrected = second / (1.0 - settings.beta2 ** state["step"].double())  # a tensor: nothing waits for a device
        divisor = corrected.sqrt_().add_(settings.eps).masked_fill_(second == 0, math.inf)
        if decays(weight.dim()):
            weight.mul_(1.0 - rate * settings.weight_decay)
        weight.addcdiv_(first, divisor, value=-rate / (1.0 - settings.beta1**step))


def _settings(plan: Plan, t: Trained) -> ModuleTrain:
    settings: ModuleTrain = getattr(plan.train, t.module)
    return settings
