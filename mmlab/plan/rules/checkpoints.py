"""Where checkpoints are kept. What reads and writes other protocols: `remote`."""

from __future__ import annotations

from collections.abc import Iterator

from mmlab.plan.problems import Fix, Problem
from mmlab.plan.schema import Plan

UNWRITTEN = ("http", "https", "pipe", "memory")
"""Protocols that nothing can be kept by: read only, or gone with the process."""


def location(plan: Plan) -> Iterator[Problem]:
    """What is saved can be read by the processes that come after."""
    kind, mark, _ = plan.checkpoint.location.partition(":")
    if mark and kind.lower() in UNWRITTEN:
        why = "nothing can be written by it" if kind.lower() != "memory" else "it ends with the process that wrote it"
        fix = Fix("keep them in the run's folder", ("checkpoint.location=",))
        yield Problem("checkpoint.location", f"{kind}: cannot keep checkpoints: {why}.", fix)
