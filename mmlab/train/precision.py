"""Number formats: of the computation, by module, and of the master weights."""

from __future__ import annotations

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
