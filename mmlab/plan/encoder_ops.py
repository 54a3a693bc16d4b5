"""Where the encoder's ops stand: in lists of their own, or between the ops of the stages whose ranks encode."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from mmlab.plan.layout import Layout, Place
from mmlab.plan.ops import COMPUTE, Op, Timeline
from mmlab.plan.schema import Plan

Play = Callable[[list[list[Op]]], Timeline]
"""Plays the op lists of all ranks and says when each op would start and end."""

TOKEN_KINDS = frozenset({"recv_tokens", "send_token_grads"})
"""A stage's ops that need the encoder's."""


def tokens_need_grad(plan: Plan) -> bool:
    """Whether what the encoder's side sends needs a gradient: the encoder trains, or the projector beside it does."""
    beside = plan.parallel.projector == "vision" and not plan.train.projector.frozen
    return not plan.train.vision.frozen or beside


def returns_token_grads(plan: Plan, place: Place) -> bool:
    """Whether a rank gives gradients of image tokens back: they are equal on all of a tensor group, so tensor rank 0
    does it for encoders outside the group, each rank for itself, and each for its share where shares are gathered."""
    if place.role != "language" or place.pp > 0 or not tokens_need_grad(plan):
        return False
    return place.tp == 0 or place.vision >= 0 or plan.parallel.transfer == "all_gather"


def with_encoder(layout: Layout, stages: Mapping[int, Sequence[Op]], play: Play) -> list[list[Op]]:
    """The op lists of all ranks, with the encoder's ops put where the placement wants them.

    `stages` holds the list of each stage rank, with the ops that receive image tokens and give gradients back.
    own_ranks: lists of their own. first_stage: just before a microbatch's forward and just after its backward, so that
    the first stage holds no more activations than its schedule says. all_ranks: forward in time for the first stage
    and no earlier than that, so that later stages encode while the pipeline fills; backward at the end of the list,
    while it drains.
    """
    plan = layout.plan
    first = stages[layout.rank_of(pp=0)]
    needed = [op.microbatch for op in first if op.kind == "recv_tokens"]
    returned = [op.microbatch for op in first if op.kind == "send_token_grads"]
    if plan.parallel.vision == "own_ranks":
        ahead = [Op("encode_ahead")] if plan.parallel.encoder_ahead else []
        own = [*_forward(plan, needed), *ahead, *_backward(plan, returned)]
        return [list(stages.get(rank, own)) for rank in range(layout.world_size)]
    if plan.parallel.vision == "first_stage":
        return [
            _beside(plan, ops) if layout.place(rank).vision >= 0 else list(ops) for rank, ops in sorted(stages.items())
        ]
    return _spread(layout, stages, play, [*_backward(plan, returned)])


def _group(plan: Plan, microbatch: int) -> range:
    """The microbatches that are encoded with one."""
    p = plan.parallel
    first = microbatch - microbatch % p.encoder_batch
    return range(first, min(first + p.encoder_batch, p.microbatches))


def _encode(plan: Plan, group: range) -> Iterator[Op]:
    yield Op("encode", group[0])
    for i in group:
        yield Op("send_tokens", i)


def _forward(plan: Plan, needed: Sequence[int]) -> Iterator[Op]:
    for group in dict.fromkeys(_group(plan, i) for i in needed):
        yield from _encode(plan, group)


def _backward(plan: Plan, returned: Sequence[int]) -> Iterator[Op]:
    """Gradients in the order in which the first stage gives them back; backward once a group has all of its."""
    waiting = {group: set(group) for group in (_group(plan, i) for i in returned)}
    for i in returned:
        yield Op("recv_token_grads", i)
        group = _group(plan, i)
        waiting[group].discard(i)
        if not waiting[group]:
            yield Op("encode_backward", group[0])


def _beside(plan: Plan, ops: Sequence[Op]) -> list[Op]:
    """A first stage's list with the encoder's ops just in time."""
    returned = [op.microbatch for op in ops if op.kind == "send_token_grads"]
    backward = iter([*_backward(plan, returned), None])
    encoded: set[range] = set()
    merged: list[Op] = []
    pending = next(backward, None)
    for op in ops:
        group = _group(plan, op.microbatch)
        if op.kind == "recv_tokens" and group not in encoded:
            encoded.add(group)
            merged += _encode(plan, group)
        merged.append(op)
        if op.kind == "send_token_grads":
            while pending is not None and (pending.kind == "encode_backward" or pending.microbatch == op.microbatch):
                merged.append(pending)
                pending = next(backward)
    return merged


def _spread(layout: Layout, stages: Mapping[int, Sequence[Op]], play: Play, backward: Sequence[Op]) -> list[list[Op]]:
    """Every rank's list with its share of the encoder's ops.

    The pipeline alone is played first. Each rank encodes a microbatch before the first of its ops that starts (or, of
    a receive, ends) when the first stage's forward of that microbatch does. All lists then agree with one order in
    time, so they cannot deadlock whatever the schedule.
    """
    plan = layout.plan
    ranks = range(layout.world_size)
    timeline = play([[op for op in stages[rank] if op.kind not in TOKEN_KINDS] for rank in ranks])
    begins: dict[int, float] = {}
    for timed in timeline[layout.rank_of(pp=0)]:
        if timed.op.kind == "forward":
            begins.setdefault(timed.op.microbatch, timed.start)
    due = {group: begins[group[0]] for group in dict.fromkeys(_group(plan, i) for i in sorted(begins))}
    merged = []
    for rank in ranks:
        played = iter(timeline[rank])
        waiting = dict(due)
        ops: list[Op] = []
        for op in stages[rank]:
            if op.kind in TOKEN_KINDS:
                now = begins[op.microbatch] if op.kind == "recv_tokens" else 0.0
            else:
                timed = next(played)
                now = timed.end if op.kind.startswith("recv") else timed.start
            for group in [group for group, when in waiting.items() if when <= now]:
                del waiting[group]
                ops += _encode(plan, group)
            ops.append(op)
        merged.append([*ops, *(op for group in waiting for op in _encode(plan, group)), *backward])
    return merged


UNIT_COSTS = {kind: 2.0 if kind == "backward" else 1.0 for kind in COMPUTE}
"""Costs with which the pipeline alone is played: a backward is two forwards (Narayanan et al. 2021, section 2.2)."""
