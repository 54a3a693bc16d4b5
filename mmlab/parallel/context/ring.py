"""Ring attention (Liu et al. 2023): every rank keeps its queries and reads the other ranks' keys and values, step by
step, while it computes; partial attentions are merged by their log-sum-exp.

In step s, rank c sends what rank c + s needs of its own keys and values and computes with those of rank c - s. Blocks
come straight from their owner instead of being handed on from rank to rank: no more bytes on any rank, fewer where a
reader sees only part of a block (half of it, on half of the pairs, under a causal mask), none where it sees nothing.
The backward reads keys and values again (nothing of another rank is kept) and sends their gradients to the owner.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from mmlab.parallel.context.blocks import AttentionPlan, Batch, Exchange
from mmlab.parallel.context.kernels import attend, attend_backward
from mmlab.parallel.context.split import ContextGroup


class _Sum:
    """A running attention of every query of this rank: output [T, H, Dh] and log-sum-exp [T, H], at least float32."""

    def __init__(self, q: Tensor) -> None:
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.out = torch.zeros(q.shape, dtype=wide, device=q.device)
        self.lse = torch.full(q.shape[:2], -math.inf, dtype=wide, device=q.device)

    def add(self, rows: Tensor | None, out: Tensor, lse: Tensor) -> None:
        """Merge a partial attention of some rows (None: all), [n, H, Dh] and [n, H]."""
        old_out = self.out if rows is None else self.out.index_select(0, rows)
        old_lse = self.lse if rows is None else self.lse.index_select(0, rows)
        total = torch.logaddexp(old_lse, lse)
        # A query that has seen nothing yet has the difference of two infinities: its weight is 0.
        keep, add = ((part - total).exp().nan_to_num_(0.0).unsqueeze(-1) for part in (old_lse, lse))
        merged = old_out * keep + out.to(old_out.dtype) * add
        if rows is None:
            self.out, self.lse = merged, total
        else:
            self.out.index_copy_(0, rows, merged)
            self.lse.index_copy_(0, rows, total)


def _take(x: Tensor, rows: Tensor) -> Tensor:
    """[T, H, ...] at rows [B, L] -> [B, H, L, ...]."""
    return x.index_select(0, rows.flatten()).unflatten(0, rows.shape).transpose(1, 2)


def _put(x: Tensor) -> Tensor:
    """[B, H, L, ...] -> [B * L, H, ...]."""
    return x.transpose(1, 2).flatten(0, 1)


def _forward(total: _Sum, work: Sequence[Batch], q: Tensor, k: Tensor, v: Tensor) -> None:
    for batch in work:
        out, lse = attend(_take(q, batch.queries), _take(k, batch.keys), _take(v, batch.keys), batch.causal, batch.mask)
        total.add(batch.queries.flatten(), _put(out), _put(lse))


class _Grads:
    """Gradients of this rank's q, k and v so far, and what the backward of a batch needs."""

    def __init__(self, q: Tensor, out: Tensor, lse: Tensor, kv: Tensor) -> None:
        self.q, self.out, self.lse = q, out, lse
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        self.dq = torch.zeros(q.shape, dtype=wide, device=q.device)
        self.dkv = torch.zeros(kv.shape, dtype=wide, device=q.device)

    def add(self, work: Sequence[Batch], grad: Tensor, kv: Tensor, dkv: Tensor) -> None:
        """Backward of some batches with keys and values `kv` [T', 2, G, Dh], into `dkv` of the same shape."""
        for batch in work:
            rows, keys = batch.queries, batch.keys
            gathered = kv.index_select(0, keys.flatten()).unflatten(0, keys.shape)
            k, v = gathered[:, :, 0].transpose(1, 2), gathered[:, :, 1].transpose(1, 2)
            out, lse = _take(self.out, rows), _take(self.lse, rows)
            dq, dk, dv = attend_backward(
                _take(grad, rows), _take(self.q, rows), k, v, out, lse, batch.causal, batch.mask
            )
            self.dq.index_add_(0, rows.flatten(), _put(dq).to(self.dq.dtype))
            dkv.index_add_(0, keys.flatten(), torch.stack([_put(dk), _put(dv)], 1).to(dkv.dtype))


class _Wire:
    """Keys, values and their gradients between the ranks of a group."""

    def __init__(self, group: ContextGroup, exchanges: Sequence[Exchange]) -> None:
        self.group, self.exchanges = group, exchanges
        self._kept: list[Tensor] = []

    def _swap(self, parts: Sequence[tuple[Tensor, int, bool]]) -> list[dist.Work]:
        """Start sends (True) and receives of [tensor, rank of the group, send]; empty tensors stay where they are."""
        moved = [part for part in parts if part[0].numel()]
        ops = [
            dist.P2POp(dist.isend if send else dist.irecv, tensor, group=self.group.group, group_peer=peer)
            for tensor, peer, send in moved
        ]
        self._kept += [tensor for tensor, _, _ in moved]
        return dist.batch_isend_irecv(ops) if ops else []

    def fetch(self, number: int, kv: Tensor) -> tuple[Tensor, list[dist.Work]]:
        """Start step `number`: what the reader needs of `kv` leaves, what this rank needs of its source arrives."""
        step = self.exchanges[number]
        arriving = kv.new_empty(step.arriving, *kv.shape[1:])
        leaving = kv.index_select(0, step.wanted)
        self.group.count("cp", kv, len(step.wanted))
        if step.skipped:
            self.group.count("cp_skipped", kv, step.skipped)
        return arriving, self._swap([(leaving, step.to, True), (arriving, step.source, False)])

    def give_back(self, number: int, dkv: Tensor) -> tuple[Tensor, list[dist.Work]]:
        """The way back of `fetch`: gradients of what arrived go to their owner, those of what left come in."""
        step = self.exchanges[number]
        arriving = dkv.new_empty(len(step.wanted), *dkv.shape[1:])
        self.group.count("cp", dkv, len(dkv))
        return arriving, self._swap([(dkv, step.source, True), (arriving, step.to, False)])

    def finish(self) -> None:
        """Forget what was sent, once everything is known to have arrived."""
        self._kept.clear()


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()


def _merge_shared(total: _Sum, rows: Tensor, group: ContextGroup) -> None:
    """Each rank's partial attention of the shared queries, merged over the ranks, in the same order on all."""
    mine = torch.cat([total.out.index_select(0, rows), total.lse.index_select(0, rows).unsqueeze(-1)], -1)
    everyone = mine.new_empty(group.size * len(rows), *mine.shape[1:])
    group.count("cp", mine, len(mine))
    dist.all_gather_into_tensor(everyone, mine, group=group.group)
    total.out.index_fill_(0, rows, 0.0)
    total.lse.index_fill_(0, rows, -math.inf)
    for part in everyone.chunk(group.size):
        total.add(rows, part[..., :-1], part[..., -1])


class _Ring(torch.autograd.Function):
    """Attention over the tokens of all ranks of a group."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, group: ContextGroup) -> Tensor:
        wire, total, kv = _Wire(group, plan.exchanges), _Sum(q), torch.stack([k, v], 1)
        coming = wire.fetch(0, kv) if plan.exchanges else None
        _forward(total, plan.partial, q, k, v)
        if len(plan.merged):
            _merge_shared(total, plan.merged, group)
        _forward(total, plan.local, q, k, v)
        for number, step in enumerate(plan.exchanges):
            assert coming is not None
            arrived, works = coming
            _wait(works)
            if number + 1 < len(plan.exchanges):  # the next blocks travel while this rank computes with these
                coming = wire.fetch(number + 1, kv)
            _forward(total, step.batches, q, arrived[:, 0], arrived[:, 1])
        wire.finish()
        out = total.out.to(q.dtype)
        ctx.save_for_backward(q, kv, out, total.lse)
        ctx.plan, ctx.group = plan, group
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, kv, out, lse = ctx.saved_tensors
        plan: AttentionPlan = ctx.plan
        group: ContextGroup = ctx.group
        grad = grads[0].contiguous()
        wire, sums = _Wire(group, plan.exchanges), _Grads(q, out, lse, kv)
        coming = wire.fetch(0, kv) if plan.exchanges else None
        if len(plan.merged):
            # Every rank's copy of a shared query uses this rank's partial attention of it.
            shared = grad.index_select(0, plan.merged)
            group.count("cp", shared, len(shared))
            dist.all_reduce(shared, group=group.group)
            sums.add(plan.partial, grad.index_copy(0, plan.merged, shared), kv, sums.dkv)
        sums.add(plan.local, grad, kv, sums.dkv)
        returning = []
        for number, step in enumerate(plan.exchanges):
            assert coming is not None
            arrived, works = coming
            _wait(works)
            if number + 1 < len(plan.exchanges):
                coming = wire.fetch(number + 1, kv)
            dkv = torch.zeros(arrived.shape, dtype=sums.dkv.dtype, device=kv.device)
            sums.add(step.batches, grad, arrived, dkv)
            returning.append((step.wanted, *wire.give_back(number, dkv)))
        for rows, back, works in returning:
            _wait(works)
            sums.dkv.index_add_(0, rows, back)
        wire.finish()
        dkv = sums.dkv.to(kv.dtype)
        return sums.dq.to(q.dtype), dkv[:, 0], dkv[:, 1], None, None


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
