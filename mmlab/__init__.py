"""mmlab: train vision-language models with hybrid parallelism from a notebook, and steer them live.

Importing this module is cheap: no torch, no ipyparallel (they load in the engines, or on first use).
"""

from __future__ import annotations

import importlib
from typing import Any

from mmlab.errors import CheckpointError, DataError, LabError, MmlabError, PlanError, RunFailed

__version__ = "0.1.0"
__all__ = ["CheckpointError", "DataError", "Lab", "LabError", "MmlabError", "Plan", "PlanError", "Run", "RunFailed"]


def __getattr__(name: str) -> Any:
    if name == "Plan":
        from mmlab.plan import Plan

        return Plan
    if name in ("Lab", "Run"):
        from mmlab import lab

        return getattr(lab, name)
    raise AttributeError(f"module 'mmlab' has no attribute {name!r}")


def load_ipython_extension(shell: Any) -> None:
    """`%load_ext mmlab`: `%mmlab`, `%%rank` and `%%ranks` (`mmlab.magics`, loaded by name: it lies above all else)."""
    importlib.import_module("mmlab.magics").register(shell)
