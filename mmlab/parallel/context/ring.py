"""Ring attention (Liu et al. 2023): every rank keeps its queries and reads the other ranks' keys and values, step by
step, while it computes; partial attentions are merged by their log-sum-exp.

In step s, rank c sends what rank c + s needs of its own keys and values and computes with those of rank c - s. Blocks
come straight from their owner instead of being handed on from rank to rank: no more bytes on any rank, fewer where a
reader sees only part of a block (half of it, on half of the pairs, under a causal mask), none where it sees nothing.
The backward reads keys and values again (nothing of another rank is kept) and sends their gradients to the owner.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from mmlab.parallel.context.blocks import AttentionPlan, Batch, Exchange, Places
from mmlab.parallel.context.kernels import attend, attend_backward
from mmlab.parallel.context.split import ContextGroup
from mmlab.parallel.tensor import at_least_float32

Pair = tuple[Tensor, Tensor]
"""Keys and values, or their gradients."""


class _Sum:
    """A running attention of every query of this rank: output [T, H, Dh] and log-sum-exp [T, H], at least float32."""

    def __init__(self, q: Tensor) -> None:
        self.out = torch.zeros(q.shape, dtype=at_least_float32(q.dtype), device=q.device)
        self.lse = torch.full(q.shape[:2], -math.inf, dtype=at_least_float32(q.dtype), device=q.device)

    def add(self, at: Places, out: Tensor, lse: Tensor) -> None:
        """Merge a partial attention [B, H, L, Dh] with log-sum-exp [B, H, L] of some queries."""
        old_out, old_lse = at.take(self.out), at.take(self.lse)
        total = torch.logaddexp(old_lse, lse)
        # A query that has seen nothing yet has the difference of two infinities: its weight is 0.
        keep, new = ((part - total).exp_().nan_to_num_(0.0).unsqueeze(-1) for part in (old_lse, lse))
        at.put(self.out, old_out.mul_(keep).addcmul_(out.to(old_out.dtype), new))
        at.put(self.lse, old_lse.copy_(total))


def _forward(total: _Sum, work: Sequence[Batch], q: Tensor, k: Tensor, v: Tensor) -> None:
    for batch in work:
        keys = batch.keys
        total.add(batch.queries, *attend(batch.queries.take(q), keys.take(k), keys.take(v), batch.causal, batch.mask))


@dataclass
class _Backward:
    """What the backward of every batch needs: queries [T, H, Dh], the whole attention's output and log-sum-exp, and
    where the gradient of the queries is summed."""

    q: Tensor
    out: Tensor
    lse: Tensor
    dq: Tensor

    def __call__(self, work: Sequence[Batch], grad: Tensor, kv: Pair, dkv: Pair) -> None:
        """Backward of some batches with keys and values `kv` [T', G, Dh] each, added to `dkv`."""
        for batch in work:
            rows, keys = batch.queries, batch.keys
            dq, dk, dv = attend_backward(
                rows.take(grad), rows.take(self.q), keys.take(kv[0]), keys.take(kv[1]),
                rows.take(self.out), rows.take(self.lse), batch.causal, batch.mask,
            )  # fmt: skip
            rows.add(self.dq, dq)
            keys.add(dkv[0], dk)
            keys.add(dkv[1], dv)


@dataclass
class _Transfer:
    """What is under way in one step of the ring: `arriving` [n, 2, G, Dh], and what must live until all has moved."""

    arriving: Tensor
    leaving: Tensor
    works: list[dist.Work]

    def wait(self) -> Tensor:
        """What has arrived."""
        for work in self.works:
            work.wait()
        return self.arriving


def _swap(group: ContextGroup, leaving: Tensor, to: int, arriving: Tensor, source: int) -> _Transfer:
    """Start sending to and receiving from ranks of the group; empty tensors stay where they are."""
    moved = ((dist.isend, leaving, to), (dist.irecv, arriving, source))
    ops = [
        dist.P2POp(function, tensor, group=group.group, group_peer=peer)
        for function, tensor, peer in moved
        if tensor.numel()
    ]
    group.count("cp", leaving, len(leaving))
    return _Transfer(arriving, leaving, dist.batch_isend_irecv(ops) if ops else [])


def _fetch(step: Exchange, group: ContextGroup, k: Tensor, v: Tensor) -> _Transfer:
    """Start a step: what the reader needs of this rank's keys and values leaves, what this rank needs arrives."""
    leaving, arriving = (k.new_empty(rows, 2, *k.shape[1:]) for rows in (len(step.wanted), step.arriving))
    leaving[:, 0], leaving[:, 1] = k.index_select(0, step.wanted), v.index_select(0, step.wanted)
    if step.skipped:
        group.count("cp_skipped", leaving, step.skipped)
    return _swap(group, leaving, step.to, arriving, step.source)


def _give_back(step: Exchange, group: ContextGroup, dkv: Tensor) -> _Transfer:
    """The way back of `_fetch`: gradients of what arrived go to their owner, those of what left come in."""
    return _swap(group, dkv, step.source, dkv.new_empty(len(step.wanted), *dkv.shape[1:]), step.to)


class _Steps:
    """The steps of the ring, each with what arrived: the next step's blocks travel while the caller computes."""

    def __init__(self, plan: AttentionPlan, group: ContextGroup, k: Tensor, v: Tensor) -> None:
        self.exchanges, self.group, self.k, self.v = plan.exchanges, group, k, v
        self._coming = self._fetch(0)

    def _fetch(self, number: int) -> _Transfer | None:
        if number >= len(self.exchanges):
            return None
        return _fetch(self.exchanges[number], self.group, self.k, self.v)

    def __iter__(self) -> Iterator[tuple[Exchange, Tensor]]:
        for number, step in enumerate(self.exchanges):
            assert self._coming is not None
            arrived = self._coming.wait()
            self._coming = self._fetch(number + 1)
            yield step, arrived


def _merge_shared(total: _Sum, rows: Tensor, group: ContextGroup) -> None:
    """Each rank's partial attention of the shared queries, merged over the ranks, in the same order on all."""
    mine = torch.cat([total.out.index_select(0, rows), total.lse.index_select(0, rows).unsqueeze(-1)], -1)
    everyone = mine.new_empty(group.size * len(rows), *mine.shape[1:])
    group.count("cp", mine, len(mine))
    dist.all_gather_into_tensor(everyone, mine, group=group.group)
    total.out.index_fill_(0, rows, 0.0)
    total.lse.index_fill_(0, rows, -math.inf)
    at = Places(rows.unsqueeze(0), None)
    for part in everyone.chunk(group.size):
        part = part.unsqueeze(0).transpose(1, 2)
        total.add(at, part[..., :-1], part[..., -1])


class _Ring(torch.autograd.Function):
    """Attention over the tokens of all ranks of a group."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, group: ContextGroup) -> Tensor:
        total, steps = _Sum(q), _Steps(plan, group, k, v)
        _forward(total, plan.partial, q, k, v)
        if len(plan.merged):
            _merge_shared(total, plan.merged, group)
        _forward(total, plan.local, q, k, v)
        for step, arrived in steps:
            _forward(total, step.batches, q, arrived[:, 0], arrived[:, 1])
        out = total.out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, total.lse)
        ctx.plan, ctx.group = plan, group
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, out, lse = ctx.saved_tensors
        plan: AttentionPlan = ctx.plan
        group: ContextGroup = ctx.group
        grad, wide = grads[0], at_least_float32(q.dtype)
        dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
        steps, back = _Steps(plan, group, k, v), _Backward(q, out, lse, dq)
        if len(plan.merged):
            # Every rank's copy of a shared query uses this rank's partial attention of it.
            shared = grad.index_select(0, plan.merged)
            group.count("cp", shared, len(shared))
            dist.all_reduce(shared, group=group.group)
            back(plan.partial, grad.index_copy(0, plan.merged, shared), (k, v), (dk, dv))
        back(plan.local, grad, (k, v), (dk, dv))
        returning: tuple[Exchange, _Transfer] | None = None
        for step, arrived in steps:
            dkv = torch.zeros(arrived.shape, dtype=wide, device=k.device)
            back(step.batches, grad, (arrived[:, 0], arrived[:, 1]), (dkv[:, 0], dkv[:, 1]))
            _collect(returning, dk, dv)
            returning = step, _give_back(step, group, dkv)
        _collect(returning, dk, dv)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _collect(returning: tuple[Exchange, _Transfer] | None, dk: Tensor, dv: Tensor) -> None:
    """Add the gradients that one step's reader gives back."""
    if returning is not None:
        step, transfer = returning
        dkv = transfer.wait()
        dk.index_add_(0, step.wanted, dkv[:, 0])
        dv.index_add_(0, step.wanted, dkv[:, 1])


def ring_attention(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, group: ContextGroup) -> Tensor:
    """Causal attention of this rank's queries over the keys of all ranks of a group.

    Args:
        q: [T, H, Dh], the queries of this rank's tokens (rotated).
        k: [T, G, Dh]; G divides H.
        v: as `k`.
        plan: what this rank computes and exchanges, made by `attention_plan` for this microbatch.
        group: the context-parallel group.

    Returns:
        [T, H, Dh] in the format of q.
    """
    return cast(Tensor, _Ring.apply(q, k, v, plan, group))
