"""Number formats: of the computation, by module, and of the master weights."""

from __future__ import annotations

import torch

from mmlab.plan.schema import Plan

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def compute_dtype(precision: str) -> torch.dtype:
    """The dtype of a plan's precision name."""
    return DTYPES[precision]


def master_dtype(plan: Plan) -> torch.dtype:
    """Weights and optimizer state: float64 when the plan computes in fp64 (as `mmlab verify` does), else float32."""
    wanted = (plan.precision.vision, plan.precision.projector, plan.precision.language)
    return torch.float64 if "fp64" in wanted else torch.float32
