"""One pure schedule: for each rank, the list of ops of a step. The same list is run, costed and drawn.

The order of a rank's passes comes from `mmlab.plan.orders`; what it sends and receives around each follows here. The
encoder is a peer of the pipeline, not a stage: `plan.encoder_ops` puts its ops into lists of their own or between those
of the stages.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmlab.plan.encoder_ops import returns_token_grads, tokens_need_grad, with_encoder
from mmlab.plan.layout import Layout, Place
from mmlab.plan.ops import COMPUTE, Kind, Op, Timed, Timeline
from mmlab.plan.orders import Pass, gpipe, interleaved, one_f_one_b, zero_bubble_h1, zero_bubble_v
from mmlab.plan.picture import schedule_svg, schedule_text
from mmlab.plan.schema import Plan
from mmlab.plan.simulate import (
    Costs,
    DeadlockError,
    bubble,
    dependencies,
    estimated_costs,
    measured_timeline,
    simulate,
)

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
    "needs_backward",
    "pass_order",
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


def row_labels(layout: Layout, rows: Sequence[int]) -> list[str]:
    """The names of rows of a picture."""
    return [f"rank {rank} · {layout.place(rank).label}" for rank in rows]


def measured_svg(plan: Plan, traces: Sequence[Mapping[str, Any]], title: str) -> str:
    """A traced step as a Gantt chart in seconds, rows as in the planned one. `traces` holds one record for each rank,
    in rank order, as `measured_timeline` takes them."""
    layout = Layout(plan)
    timeline, rows = measured_timeline(traces), rows_to_draw(layout)
    return schedule_svg([timeline[rank] for rank in rows], title, row_labels(layout, rows), unit="s")


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

    def dependencies(self) -> list[list[list[tuple[int, int]]]]:
        """For each op of each rank the ops that it waits for elsewhere, as (rank, index)."""
        return dependencies(self, self.plan)

    def view(self) -> Any:
        """The step as planned as a live picture: ops told by hover and keyboard, played at any speed."""
        return importlib.import_module("mmlab.ui.plans").schedule_view(self.plan)

    def _drawn(self) -> tuple[Timeline, list[str], str]:
        layout = Layout(self.plan)
        rows = rows_to_draw(layout)
        timeline = self.simulate()
        p = self.plan.parallel
        rest = (
            f"; {len(rows)} of {layout.world_size} ranks, the others do the same" if len(rows) < len(timeline) else ""
        )
        title = f"{self.plan.name}: {p.schedule}, {p.microbatches} microbatches, as planned{rest}"
        return [timeline[rank] for rank in rows], row_labels(layout, rows), title

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


def pass_order(plan: Plan, pp: int) -> list[Pass]:
    """Passes of the rank at position `pp` of a pipeline, in order (backward even where nothing needs it)."""
    p = plan.parallel
    if p.schedule == "gpipe":
        return gpipe(p.microbatches)
    if p.schedule == "interleaved":
        return interleaved(pp, p.pp, p.microbatches, p.chunks_per_rank)
    order = {"1f1b": one_f_one_b, "zb_h1": zero_bubble_h1, "zb_v": zero_bubble_v}[p.schedule]
    return order(pp, p.pp, p.microbatches)


def build_schedule(plan: Plan) -> Schedule:
    """The schedule of a plan."""
    layout = Layout(plan)
    stages = {p.rank: list(_stage_ops(plan, layout, p)) for p in layout.places if p.role == "language"}
    ops = with_encoder(layout, stages)
    return Schedule(plan, [[*ops[p.rank], *_end_of_step(plan, layout, p)] for p in layout.places])


def _stage_ops(plan: Plan, layout: Layout, place: Place) -> Iterator[Op]:
    for each in pass_order(plan, place.pp):
        stage = layout.stages.at(place.pp, each.chunk)
        if each.kind == "forward":
            yield from _forward(layout, place, each, stage)
        elif each.kind == "backward_weight":
            if stage_trains(plan, stage):
                yield Op("backward_weight", each.microbatch, chunk=each.chunk)
        elif needs_backward(plan, stage):
            yield from _backward(layout, place, each, stage)


def _neighbour(layout: Layout, place: Place, stage: int) -> int:
    """The rank that holds a stage of this rank's pipeline; -1 for this rank itself, and beyond the ends."""
    if not 0 <= stage < layout.stages.count:
        return -1
    rank = layout.rank_of(pp=layout.stages.holders[stage][0], dp=place.dp, cp=place.cp, tp=place.tp)
    return -1 if rank == place.rank else rank


def _forward(layout: Layout, place: Place, each: Pass, stage: int) -> Iterator[Op]:
    i, chunk = each.microbatch, each.chunk
    before, after = _neighbour(layout, place, stage - 1), _neighbour(layout, place, stage + 1)
    if stage == 0:
        yield Op("recv_tokens", i, chunk=chunk)
    if before >= 0:
        yield Op("recv_forward", i, before, chunk)
    yield Op("forward", i, chunk=chunk)
    if after >= 0:
        yield Op("send_forward", i, after, chunk)


def _backward(layout: Layout, place: Place, each: Pass, stage: int) -> Iterator[Op]:
    plan, i, chunk = layout.plan, each.microbatch, each.chunk
    before, after = _neighbour(layout, place, stage - 1), _neighbour(layout, place, stage + 1)
    if after >= 0:
        yield Op("recv_backward", i, after, chunk)
    yield Op(each.kind, i, chunk=chunk)
    if before >= 0 and needs_backward(plan, stage - 1):
        yield Op("send_backward", i, before, chunk)
    if stage == 0 and returns_token_grads(plan, place):
        yield Op("send_token_grads", i, chunk=chunk)


def _end_of_step(plan: Plan, layout: Layout, place: Place) -> Iterator[Op]:
    trains, tied = place.vision >= 0 and tokens_need_grad(plan), False
    if place.role == "language":
        trains = trains or any(stage_trains(plan, stage) for stage in layout.stages.of(place.pp))
        shares = plan.model.language.tied_embeddings and not plan.train.language.base_frozen
        tied = shares and bool(layout.group_of(layout.embedding_groups, place.rank))
    if trains:
        yield Op("reduce")
    if tied:
        yield Op("reduce_embedding")
    yield Op("norm")
    yield Op("update")
