"""One pure schedule: for each rank, the list of ops of a step. The same list is run, costed and drawn.

GPipe (Huang et al. 2019) runs all forwards, then all backwards; 1F1B (Narayanan et al. 2021, section 2.2) starts
backward as early as it can, so that stage s holds at most pp - s microbatches. Encoder ranks are peers of the
pipeline, not a stage: they encode and send every microbatch in order, then take gradients of image tokens in the order
in which the first stage finishes them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mmlab.errors import PlanError
from mmlab.plan.layout import Layout, Place
from mmlab.plan.schema import Plan

Kind = Literal[
    "encode", "send_tokens", "recv_token_grads", "encode_backward",
    "recv_tokens", "recv_forward", "forward", "send_forward",
    "recv_backward", "backward", "send_backward", "send_token_grads",
    "reduce", "reduce_embedding", "norm", "update",
]  # fmt: skip

COMPUTE = ("encode", "forward", "backward", "encode_backward")
"""Kinds that compute; the others move or reduce data, except `update`."""


@dataclass(frozen=True)
class Op:
    """One op of a rank.

    `microbatch` is its index, -1 for ops of the whole step. `peer` is the rank at the other end of a transfer between
    stages, -1 otherwise: token ops have several peers (all encoder ranks; the first stage of every replica), and which
    images an encoder rank owns is said by the step manifest. Token ops and encoder ops of microbatch m stand for
    microbatch m of every replica. Gradients of image tokens leave from tensor rank 0 only.
    """

    kind: Kind
    microbatch: int = -1
    peer: int = -1


def vision_trains(plan: Plan) -> bool:
    """Whether the encoder has something to train."""
    return not plan.train.vision.frozen


def tokens_need_grad(plan: Plan) -> bool:
    """Whether what the encoder ranks send needs a gradient: the encoder trains, or the projector beside it does."""
    beside = plan.parallel.projector == "vision" and not plan.train.projector.frozen
    return vision_trains(plan) or beside


def stage_trains(plan: Plan, stage: int) -> bool:
    """Whether a stage has something to train: decoder blocks, or the projector where it lives on the first stage."""
    projector = stage == 0 and plan.parallel.projector == "first_stage" and not plan.train.projector.frozen
    return projector or not plan.train.language.frozen


def needs_backward(plan: Plan, stage: int) -> bool:
    """Whether a stage runs backward: something trains in it or before it (encoder ranks come before stage 0)."""
    return tokens_need_grad(plan) or any(stage_trains(plan, before) for before in range(stage + 1))


@dataclass(frozen=True)
class Schedule:
    """The ops of one step: `ops[rank]` in the order of execution."""

    plan: Plan
    ops: list[list[Op]]


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
    """The schedule of a plan. PlanError for a schedule or placement that this version does not have."""
    if plan.parallel.vision != "own_ranks":
        raise PlanError(f"parallel.vision = {plan.parallel.vision}: not available in this version; use own_ranks")
    layout = Layout(plan)
    ops = []
    for place in layout.places:
        body = _encoder_ops(plan) if place.role == "vision" else _stage_ops(plan, layout, place)
        ops.append([*body, *_end_of_step(plan, layout, place)])
    return Schedule(plan, ops)


def _encoder_ops(plan: Plan) -> Iterator[Op]:
    for i in range(plan.parallel.microbatches):
        yield Op("encode", i)
        yield Op("send_tokens", i)
    if tokens_need_grad(plan):
        for kind, i in microbatch_order(plan, 0):
            if kind == "backward":
                yield Op("recv_token_grads", i)
                yield Op("encode_backward", i)


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
            if stage == 0 and place.tp == 0 and place.cp == 0 and tokens_need_grad(plan):
                yield Op("send_token_grads", i)


def _end_of_step(plan: Plan, layout: Layout, place: Place) -> Iterator[Op]:
    if place.role == "vision":
        trains, group, tied = tokens_need_grad(plan), layout.vision_group, False
    else:
        trains, group = stage_trains(plan, place.pp), layout.group_of(layout.dp_groups, place.rank)
        ends = plan.parallel.pp > 1 and place.pp in (0, plan.parallel.pp - 1)
        tied = ends and plan.model.language.tied_embeddings and not plan.train.language.frozen
    if trains and len(group) > 1:
        yield Op("reduce")
    if tied:
        yield Op("reduce_embedding")
    yield Op("norm")
    if trains:
        yield Op("update")
