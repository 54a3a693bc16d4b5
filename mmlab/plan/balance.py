"""Which split of the decoder makes the slowest rank of a pipeline as fast as can be, from measured times."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from mmlab.plan.schema import Plan
from mmlab.plan.stages import Stages, even_split, stages_of


@dataclass(frozen=True)
class LayerTimes:
    """Seconds of forward and backward of a microbatch, on one rank."""

    block: float
    """One decoder block."""
    embedding: float
    """Looking up the tokens."""
    head: float
    """Final norm, output layer and loss."""
    encoder: float = 0.0
    """The encoder's share of the first stage's ranks (vision = "first_stage"), with the projector beside it."""
    projector: float = 0.0
    """The projector, where it lives on the first stage."""


def rank_seconds(times: LayerTimes, stages: Stages, sizes: tuple[int, ...]) -> list[float]:
    """Seconds of a microbatch on each rank of a pipeline whose stages have `sizes` decoder blocks."""
    seconds = [0.0] * stages.pp
    for stage, (pp, _) in enumerate(stages.holders):
        seconds[pp] += sizes[stage] * times.block + _extra(times, stages, stage)
    return seconds


def _extra(times: LayerTimes, stages: Stages, stage: int) -> float:
    """What a stage does beside its blocks."""
    first = times.embedding + times.encoder + times.projector if stage == 0 else 0.0
    return first + (times.head if stage == stages.count - 1 else 0.0)


def balanced_split(plan: Plan, times: LayerTimes) -> tuple[int, ...]:
    """Decoder blocks of each stage, at least one, such that the slowest rank is as fast as can be.

    All blocks cost the same, so giving them one by one to the rank with the least to do is exact: moving a block from
    the slowest rank elsewhere could only help if some rank had less to do when it got that block. Within a rank the
    lighter chunk gets it.
    """
    stages = stages_of(plan)
    sizes = [1] * stages.count
    for _ in range(plan.model.language.layers - stages.count):
        seconds = rank_seconds(times, stages, tuple(sizes))
        rank = min(range(stages.pp), key=seconds.__getitem__)
        mine = stages.of(rank)
        sizes[min(mine, key=lambda stage: sizes[stage] * times.block + _extra(times, stages, stage))] += 1
    return tuple(sizes)


def report(plan: Plan, times: LayerTimes) -> dict[str, Any]:
    """What was measured and chosen, for events and the command line: times, split, seconds of each rank, and the
    seconds that an even split would have."""
    stages, chosen = stages_of(plan), balanced_split(plan, times)
    even = even_split(plan.model.language.layers, stages.count)
    return {
        "times": asdict(times),
        "layers_per_stage": list(chosen),
        "seconds": rank_seconds(times, stages, chosen),
        "even": rank_seconds(times, stages, even),
    }
