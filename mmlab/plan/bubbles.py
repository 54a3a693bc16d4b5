"""Bubbles: how much of a step the stages do not compute, by formula and rank by rank."""

from __future__ import annotations

from typing import NamedTuple

from mmlab.plan.ops import COMPUTE, PASSES, Timeline
from mmlab.plan.schema import Plan


class Ideal(NamedTuple):
    """The bubble that theory gives a schedule: its share (0 to 1), the formula, and what that takes for granted."""

    share: float
    formula: str
    given: str


_EQUAL = "equal stages, transfers that take no time, encoder not counted"
_THIRDS = f"{_EQUAL}, forward and both halves of backward equally long"


def ideal_bubble(plan: Plan) -> Ideal | None:
    """The formula of a plan's schedule, with p ranks in a pipeline, m microbatches and v model chunks a rank; None
    where there is none (zb_v with fewer than 2 p - 1 microbatches)."""
    parallel = plan.parallel
    p, m, v = parallel.pp, parallel.microbatches, parallel.chunks_per_rank
    if parallel.schedule == "interleaved":
        return Ideal((p - 1) / (v * m + p - 1), "(p - 1) / (v m + p - 1)", _EQUAL)
    if parallel.schedule == "zb_h1":
        return Ideal((p - 1) / (3 * m + p - 1), "(p - 1) / (3 m + p - 1)", _THIRDS)
    if parallel.schedule == "zb_v":
        return Ideal((p - 1) / (6 * m + p - 1), "(p - 1) / (6 m + p - 1)", _THIRDS) if m >= 2 * p - 1 else None
    return Ideal((p - 1) / (m + p - 1), "(p - 1) / (m + p - 1)", _EQUAL)


def idle_shares(timeline: Timeline) -> list[float]:
    """For each rank, the share (0 to 1) of the stages' time in which it does not compute. The mean over the ranks that
    hold stages is `bubble`; encoder ranks of their own compute outside of that time too, which is not counted."""
    busy = [[t for t in ops if t.op.kind in COMPUTE] for ops in timeline]
    stages = [ops for ops in busy if any(t.op.kind in PASSES for t in ops)]
    start = min((t.start for ops in stages for t in ops), default=0.0)
    end = max((t.end for ops in stages for t in ops), default=0.0)
    if end <= start:
        return [0.0 for _ in timeline]
    return [1 - sum(max(0.0, min(t.end, end) - max(t.start, start)) for t in ops) / (end - start) for ops in busy]
