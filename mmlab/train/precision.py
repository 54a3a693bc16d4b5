"""Number formats: of the computation, by module, and of the master weights; the loss scale of fp16."""

from __future__ import annotations

from typing import Any

import torch

from mmlab.models.build import FORMATS
from mmlab.plan.schema import Plan


def compute_dtype(precision: str) -> torch.dtype:
    """The dtype of a plan's precision name."""
    return FORMATS[precision]


def master_dtype(plan: Plan) -> torch.dtype:
    """Weights and optimizer state: float64 when the plan computes in fp64 (as `mmlab verify` does), else float32."""
    wanted = (plan.precision.vision, plan.precision.projector, plan.precision.language)
    return torch.float64 if "fp64" in wanted else torch.float32


LARGEST_SCALE = 2.0**24
"""A run whose gradients vanish for good would double its scale until it is infinite; fp16's range spans 2^40."""


class LossScale:
    """Dynamic loss scaling (Micikevicius et al. 2018, section 3.2), equal on every rank.

    The loss is multiplied by `value`, so that gradients that fp16 would round to zero survive the backward pass. All
    modules share one scale: gradients cross from one to the other. It is always a power of two, so that dividing by it
    is exact. Without fp16 it is 1 and stays so.
    """

    def __init__(self, plan: Plan) -> None:
        self.active = plan.precision.scales_loss
        self.window = plan.precision.loss_scale_window
        self._start = 2.0**plan.precision.loss_scale_power if self.active else 1.0
        self.value = self._start
        self.good = 0
        """Steps without overflow since the scale last changed."""

    def judge(self, finite: bool) -> bool:
        """Take note of a step whose gradients were all finite, or not. True when its update is to be left out and the
        next step, with half the scale, may do better; False when all is well or no smaller scale could help."""
        if finite:
            self.good += 1
            if self.active and self.good >= self.window:
                self.value, self.good = min(LARGEST_SCALE, self.value * 2.0), 0
            return False
        if not self.active or self.value <= 1.0:
            return False
        self.value, self.good = self.value / 2.0, 0
        return True

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps; powers of two and counts, so JSON keeps them exactly. Empty without fp16."""
        return {"value": self.value, "good": self.good} if self.active else {}

    def load(self, state: dict[str, Any]) -> None:
        """Stand where a checkpoint was saved; from the plan's start where it was saved without fp16."""
        self.value, self.good = state.get("value", self._start), state.get("good", 0)
        if not self.active:
            self.value, self.good = 1.0, 0
