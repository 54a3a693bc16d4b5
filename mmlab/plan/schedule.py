"""One pure schedule: for each rank, the list of ops of a step. The same list is run, costed and drawn.

GPipe (Huang et al. 2019) runs all forwards, then all backwards; 1F1B (Narayanan et al. 2021, section 2.2) starts
backward as early as it can, so that stage s holds at most pp - s microbatches. The encoder is a peer of the pipeline,
not a stage: `plan.encoder_ops` puts its ops into lists of their own or between those of the stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mmlab.errors import PlanError
from mmlab.plan.encoder_ops import UNIT_COSTS, returns_token_grads, tokens_need_grad, with_encoder
from mmlab.plan.layout import Layout, Place
from mmlab.plan.ops import COMPUTE, Kind, Op, Timed, Timeline
from mmlab.plan.picture import schedule_svg, schedule_text
from mmlab.plan.schema import Plan
from mmlab.plan.simulate import Costs, DeadlockError, bubble, estimated_costs, measured_timeline, simulate

__all__ = [
    "COMPUTE",
    "DeadlockError",
    "Kind",
    "Op",
    "Schedule",
    "Timed",
    "Timeline",
    "bubble",
    "build_schedule",
    "estimated_costs",
    "measured_svg",
    "measured_timeline",
    "microbatch_order",
    "needs_backward",
    "rows_to_draw",
    "schedule_svg",
    "schedule_text",
    "simulate",
    "stage_trains",
    "tokens_need_grad",
    "vision_trains",
]

_MANY_RANKS = 24
"""Above this, pictures show one tensor rank of each group, and the first replica alone."""


def vision_trains(plan: Plan) -> bool:
    """Whether the encoder has something to train."""
    return not plan.train.vision.frozen


def stage_trains(plan: Plan, stage: int) -> bool:
    """Whether a stage has something to train: decoder blocks, or the projector where it lives on the first stage."""
    projector = stage == 0 and plan.parallel.projector == "first_stage" and not plan.train.projector.frozen
    return projector or not plan.train.language.frozen


def needs_backward(plan: Plan, stage: int) -> bool:
    """Whether a stage runs backward: something trains in it or before it (encoder ranks come before stage 0)."""
    return tokens_need_grad(plan) or any(stage_trains(plan, before) for before in range(stage + 1))


def rows_to_draw(layout: Layout) -> list[int]:
    """The ranks a picture shows: all, or (of many) every rank of the encoder's own and tensor rank 0 of the first
    replica's stages, whose ops the other tensor ranks and replicas repeat."""
    if layout.world_size <= _MANY_RANKS:
        return list(range(layout.world_size))
    stages = [
        place.rank for place in layout.places if place.role == "language" and place.tp == place.cp == place.dp == 0
    ]
    return list(range(layout.first)) + stages


def _labels(layout: Layout, rows: Sequence[int]) -> list[str]:
    return [f"rank {rank} · {layout.place(rank).label}" for rank in rows]


def measured_svg(plan: Plan, traces: Sequence[Mapping[str, Any]], title: str) -> str:
    """A traced step as a Gantt chart in seconds, rows as in the planned one. `traces` holds one record for each rank,
    in rank order, as `measured_timeline` takes them."""
    layout = Layout(plan)
    timeline, rows = measured_timeline(traces), rows_to_draw(layout)
    return schedule_svg([timeline[rank] for rank in rows], title, _labels(layout, rows), unit="s")


@dataclass(frozen=True)
class Schedule:
    """The ops of one step: `ops[rank]` in the order of execution. Shows as a picture of the step as planned."""

    plan: Plan
    ops: list[list[Op]]

    def simulate(self, costs: Costs | None = None) -> Timeline:
        """When each op starts and ends; durations are estimated from operation counts where `costs` is absent."""
        return simulate(self, self.plan, costs)

    def bubble(self, costs: Costs | None = None) -> float:
        """Share (0 to 1) of the stages' time in which they do not compute."""
        return bubble(self.simulate(costs))

    def _drawn(self) -> tuple[Timeline, list[str], str]:
        layout = Layout(self.plan)
        rows = rows_to_draw(layout)
        timeline = self.simulate()
        p = self.plan.parallel
        rest = (
            f"; {len(rows)} of {layout.world_size} ranks, the others do the same" if len(rows) < len(timeline) else ""
        )
        title = f"{self.plan.name}: {p.schedule}, {p.microbatches} microbatches, as planned{rest}"
        return [timeline[rank] for rank in rows], _labels(layout, rows), title

    def svg(self) -> str:
        """The step as planned: a Gantt chart, in units of one mean forward of a stage."""
        timeline, labels, title = self._drawn()
        return schedule_svg(timeline, title, labels, unit="mean forwards of a stage")

    def __str__(self) -> str:
        timeline, labels, title = self._drawn()
        return f"{title}\n{schedule_text(timeline, labels)}"

    def __repr__(self) -> str:
        return str(self)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        svg = self.svg()
        return {"text/plain": str(self), "text/html": svg, "image/svg+xml": svg}


def microbatch_order(plan: Plan, stage: int) -> list[tuple[Literal["forward", "backward"], int]]:
    """Forward and backward of a stage's microbatches in order (backward even where nothing needs it).

    PlanError for a schedule that this version does not have.
    """
    p, m = plan.parallel, plan.parallel.microbatches
    if p.schedule not in ("gpipe", "1f1b"):
        raise PlanError(f"parallel.schedule = {p.schedule}: not available in this version; use 1f1b or gpipe")
    warmup = m if p.schedule == "gpipe" else min(p.pp - stage - 1, m)
    order: list[tuple[Literal["forward", "backward"], int]] = [("forward", i) for i in range(warmup)]
    for i in range(m - warmup):
        order += [("forward", warmup + i), ("backward", i)]
    return order + [("backward", i) for i in range(m - warmup, m)]


def build_schedule(plan: Plan) -> Schedule:
    """The schedule of a plan. PlanError for a schedule that this version does not have."""
    layout = Layout(plan)
    stages = {p.rank: list(_stage_ops(plan, layout, p)) for p in layout.places if p.role == "language"}
    ops = with_encoder(layout, stages, lambda lists: simulate(Schedule(plan, lists), plan, UNIT_COSTS))
    return Schedule(plan, [[*ops[p.rank], *_end_of_step(plan, p)] for p in layout.places])


def _stage_ops(plan: Plan, layout: Layout, place: Place) -> Iterator[Op]:
    stage, last = place.pp, plan.parallel.pp - 1
    at = {"dp": place.dp, "cp": place.cp, "tp": place.tp}
    before = layout.rank_of(pp=stage - 1, **at) if stage > 0 else -1
    after = layout.rank_of(pp=stage + 1, **at) if stage < last else -1
    for kind, i in microbatch_order(plan, stage):
        if kind == "forward":
            yield Op("recv_tokens", i) if stage == 0 else Op("recv_forward", i, before)
            yield Op("forward", i)
            if stage < last:
                yield Op("send_forward", i, after)
        elif needs_backward(plan, stage):
            if stage < last:
                yield Op("recv_backward", i, after)
            yield Op("backward", i)
            if stage > 0 and needs_backward(plan, stage - 1):
                yield Op("send_backward", i, before)
            if returns_token_grads(plan, place):
                yield Op("send_token_grads", i)


def _end_of_step(plan: Plan, place: Place) -> Iterator[Op]:
    trains, tied = place.vision >= 0 and tokens_need_grad(plan), False
    if place.role == "language":
        trains = trains or stage_trains(plan, place.pp)
        ends = plan.parallel.pp > 1 and place.pp in (0, plan.parallel.pp - 1)
        tied = ends and plan.model.language.tied_embeddings and not plan.train.language.base_frozen
    if trains:
        yield Op("reduce")
    if tied:
        yield Op("reduce_embedding")
    yield Op("norm")
    yield Op("update")
