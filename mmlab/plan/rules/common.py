"""What rules share: their type, and arithmetic for fixes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from mmlab.errors import LabError
from mmlab.plan.problems import Problem
from mmlab.plan.schema import LanguageConfig, Plan

Rule = Callable[[Plan], Iterator[Problem]]
"""Yields what is wrong with a plan; nothing when it is satisfied."""


def check_platform(platform: str = "") -> None:
    """LabError on native Windows, where engines cannot start; `platform` as `sys.platform`, which is the default."""
    if (platform or sys.platform) == "win32":
        raise LabError("mmlab does not run on native Windows; use WSL2 (`wsl --install`) and install it there")


def divisor(limit: int, *numbers: int) -> int:
    """The largest number of at most `limit` (and at least 1) that divides all `numbers`."""
    return next(d for d in range(max(1, limit), 0, -1) if all(number % d == 0 for number in numbers))


def tensor_sizes(c: LanguageConfig) -> tuple[tuple[str, str, int], ...]:
    """What tensor parallelism splits: (field, what it is, size)."""
    return (
        ("heads", "heads", c.heads),
        ("kv_heads", "key/value heads", c.kv_heads),
        ("vocab_size", "rows of the embedding table", c.vocab_size),
        ("intermediate", "columns of the MLP", c.mlp_width),
    )
