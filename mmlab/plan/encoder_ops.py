"""Where the encoder's ops stand: in lists of their own, or between the ops of the stages whose ranks encode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from mmlab.plan.layout import Layout, Place
from mmlab.plan.ops import Op
from mmlab.plan.schema import Plan


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


def with_encoder(layout: Layout, stages: Mapping[int, Sequence[Op]]) -> list[list[Op]]:
    """The op lists of all ranks, with the encoder's ops put where the placement wants them.

    `stages` holds the list of each stage rank, with the ops that receive image tokens and give gradients back.
    own_ranks: lists of their own. first_stage: just before a microbatch's forward and just after its backward, so that
    the first stage holds no more activations than its schedule says. all_ranks: the first stage encodes just in time,
    the others while the pipeline fills; backward at the end of every list, while it drains. Nothing that encodes waits
    for anything but the ops before it, so no schedule can deadlock by it.
    """
    plan = layout.plan
    first = stages[layout.rank_of(pp=0)]
    needed = [op.microbatch for op in first if op.kind == "recv_tokens"]
    returned = [op.microbatch for op in first if op.kind == "send_token_grads"]
    forward, backward = list(_forward(plan, needed)), list(_backward(plan, returned))
    if plan.parallel.vision == "own_ranks":
        ahead = [Op("encode_ahead")] if plan.parallel.encoder_ahead else []
        own = [*forward, *ahead, *backward]
        return [list(stages.get(rank, own)) for rank in range(layout.world_size)]
    merged = []
    for rank, ops in sorted(stages.items()):
        embeds = layout.place(rank).pp == 0
        if plan.parallel.vision == "first_stage":
            merged.append(_beside(ops, forward, backward) if embeds else list(ops))
        else:
            merged.append([*(_beside(ops, forward, []) if embeds else [*forward, *ops]), *backward])
    return merged


def encoded_with(microbatch: int, together: int, microbatches: int) -> range:
    """The microbatches, of so many in a step, that are encoded with one where so many are encoded together."""
    first = microbatch - microbatch % together
    return range(first, min(first + together, microbatches))


def _group(plan: Plan, microbatch: int) -> range:
    return encoded_with(microbatch, plan.parallel.encoder_batch, plan.parallel.microbatches)


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


def _beside(ops: Sequence[Op], forward: Sequence[Op], backward: Sequence[Op]) -> list[Op]:
    """A first stage's list with the encoder's: microbatches are encoded before the first of them is needed, and a
    gradient is taken after it has been given back."""
    merged: list[Op] = []
    before, after = list(forward), list(backward)
    for op in ops:
        if op.kind == "recv_tokens" and before and before[0].microbatch == op.microbatch:
            merged += _with_next(before, "send_tokens")
        merged.append(op)
        if op.kind == "send_token_grads" and after:
            merged += _with_next(after, "encode_backward")
    return merged


def _with_next(ops: list[Op], kind: str) -> list[Op]:
    """Takes the first of some ops, and those of a kind that follow it."""
    taken = [ops.pop(0)]
    while ops and ops[0].kind == kind:
        taken.append(ops.pop(0))
    return taken
