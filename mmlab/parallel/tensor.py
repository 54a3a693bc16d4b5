"""Tensor parallelism by explicit collectives on plain tensors (Megatron-LM, Shoeybi et al. 2019, section 3).

A column-parallel linear layer takes its input through `copy_to_group` (identity forward, all-reduce backward) and a
row-parallel one hands its output to `reduce_from_group` (all-reduce forward, identity backward). Column-parallel
layers with one input share one `copy_to_group`, so a decoder block costs two all-reduces forward and two backward.

With `TensorGroup.sequence` (Megatron sequence parallel, Korthikanti et al. 2022, section 4.2.2) what lies between such
layers is split by tokens: all-gather before column-parallel layers and reduce-scatter after row-parallel ones, each the
other's backward. `enter_columns` and `leave_rows` are either.

Without it everything that is communicated goes through `TensorGroup.all_reduce`: what gathers does so by summing into
zeros (x + 0 is exact). At these sizes (kilobytes) the number of collectives is what costs, not their bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mmlab.parallel.traffic import Traffic

IGNORED = -100
"""Target of a position that has nothing to predict."""


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """The format for what half precision would spoil (norms, rotations, loss): float64 if `dtype` is, else float32."""
    return dtype if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class TensorGroup:
    """The ranks that share the layers of one stage; a single rank has neither group nor mesh."""

    group: dist.ProcessGroup | None = None
    """Process group of the tensor-parallel ranks."""
    rank: int = 0
    """This rank's index in the group."""
    size: int = 1
    """Ranks in the group."""
    mesh: DeviceMesh | None = None
    """One-dimensional mesh over the group, on which parameters are DTensors."""
    traffic: Traffic | None = None
    """Where the bytes are counted."""
    sequence: bool = False
    """Whether norms and residuals hold a share of the tokens on each rank (Megatron sequence parallel)."""

    def share(self, tokens: int) -> int:
        """Rows of what lies between tensor-parallel layers, for a microbatch of `tokens`: all, or this rank's share of
        them, padded to equal shares (of one row at least: no collective is empty)."""
        return max(1, -(-tokens // self.size)) if self.sequence else tokens

    def all_gather(self, share: Tensor) -> Tensor:
        """[S, D] -> [size * S, D], the shares of all ranks in order."""
        if self.traffic is not None:
            self.traffic.add("tp", share)
        whole = share.new_empty(self.size * share.shape[0], *share.shape[1:])
        dist.all_gather_into_tensor(whole, share.contiguous(), group=self.group)
        return whole

    def reduce_scatter(self, whole: Tensor) -> Tensor:
        """[size * S, D] -> [S, D]: this rank's share of the sum over the group."""
        if self.traffic is not None:
            self.traffic.add("tp", whole)
        share = whole.new_empty(whole.shape[0] // self.size, *whole.shape[1:])
        dist.reduce_scatter_tensor(share, whole.contiguous(), group=self.group)
        return share

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum a tensor over the group, in place."""
        if self.traffic is not None:
            self.traffic.add("tp", tensor)
        dist.all_reduce(tensor, group=self.group)


class _Local(torch.autograd.Function):
    """DTensor to its local tensor; the gradient comes back with the same placements.

    What `to_local(grad_placements=...)` does, without deriving shape and placements of each gradient anew: 45 instead
    of 110 us above a plain parameter for forward and backward (CPU), for every parameter and microbatch.
    """

    @staticmethod
    def forward(ctx: Any, parameter: DTensor) -> Tensor:
        ctx.spec = parameter._spec
        plain = parameter._local_tensor
        return plain.view_as(plain)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return DTensor(grads[0], ctx.spec, requires_grad=False)


def local(parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The plain tensor that this rank computes with.

    Args:
        parameter: a parameter, DTensor or plain. The gradient of a replicated one must be the same on every rank.
        dtype: number format of the computation; None keeps the parameter's own.

    Returns:
        The local shard, cast if necessary; gradients flow back to `parameter` with the parameter's own placements.
    """
    if isinstance(parameter, DTensor):
        parameter = cast(Tensor, _Local.apply(parameter))
    return parameter if dtype is None or parameter.dtype == dtype else parameter.to(dtype)


class _Copy(torch.autograd.Function):
    """Identity forward, sum over the group backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorGroup) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # A copy, because autograd may hand the same gradient tensor to other nodes.
        total = grads[0].clone(memory_format=torch.contiguous_format)
        ctx.tp.all_reduce(total)
        return total, None


class _Reduce(torch.autograd.Function):
    """Sum over the group forward, identity backward."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, tp: TensorGroup) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        tp.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _Gather(torch.autograd.Function):
    """Concatenation of the last dim over the group forward, this rank's slice backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorGroup) -> Tensor:
        ctx.slice = slice(tp.rank * x.shape[-1], (tp.rank + 1) * x.shape[-1])
        whole = x.new_zeros(*x.shape[:-1], x.shape[-1] * tp.size)
        whole[..., ctx.slice] = x
        tp.all_reduce(whole)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0][..., ctx.slice], None


def _padded(x: Tensor, tp: TensorGroup) -> Tensor:
    """[T, D] -> [size * S, D], zeros after the end."""
    missing = tp.size * tp.share(x.shape[0]) - x.shape[0]
    return F.pad(x, (0, 0, 0, missing)) if missing else x


class _GatherTokens(torch.autograd.Function):
    """[S, D] shares to all T tokens forward; sum over the group and this rank's share backward."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, tp: TensorGroup, tokens: int) -> Tensor:
        ctx.tp = tp
        return tp.all_gather(share)[:tokens]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return ctx.tp.reduce_scatter(_padded(grads[0], ctx.tp)), None, None


class _ScatterTokens(torch.autograd.Function):
    """Sum over the group of [T, D] and this rank's share of it forward; all T tokens' gradients backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: TensorGroup) -> Tensor:
        ctx.tp, ctx.tokens = tp, x.shape[0]
        return tp.reduce_scatter(_padded(x, tp))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.tp.all_gather(grads[0])[: ctx.tokens], None


class _OnlyFirst(torch.autograd.Function):
    """`x` on the group's first rank and zeros on the others forward, identity backward."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, tp: TensorGroup) -> Tensor:
        return x.view_as(x) if tp.rank == 0 else torch.zeros_like(x)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


def one_summand(x: Tensor, tp: TensorGroup) -> Tensor:
    """`x` (the same on every rank) as summand of a sum over the group that has it once; its gradient is whole on every
    rank, as that of the sum's other summands is."""
    return cast(Tensor, _OnlyFirst.apply(x, tp)) if tp.sequence and tp.size > 1 else x


def enter_columns(x: Tensor, tp: TensorGroup, tokens: int) -> Tensor:
    """The input [T, D] of column-parallel layers, from [S, D] (`S = tp.share(T)`); as `copy_to_group` without
    sequence parallelism."""
    if tp.sequence and tp.size > 1:
        return cast(Tensor, _GatherTokens.apply(x, tp, tokens))
    return copy_to_group(x, tp)


def leave_rows(x: Tensor, tp: TensorGroup) -> Tensor:
    """The sum over the group of row-parallel layers' outputs [T, D], as [S, D]; as `reduce_from_group` without
    sequence parallelism."""
    if tp.sequence and tp.size > 1:
        return cast(Tensor, _ScatterTokens.apply(x, tp))
    return reduce_from_group(x, tp)


def copy_to_group(x: Tensor, tp: TensorGroup) -> Tensor:
    """`x` (the same on every rank) as input of column-parallel layers; its gradient is summed over the group.

    Nothing is communicated where `x` needs no gradient.
    """
    return x if tp.size == 1 else cast(Tensor, _Copy.apply(x, tp))


def reduce_from_group(x: Tensor, tp: TensorGroup) -> Tensor:
    """The sum of `x` (a partial result on every rank) over the group; the gradient passes unchanged."""
    return x if tp.size == 1 else cast(Tensor, _Reduce.apply(x, tp))


def gather_from_group(x: Tensor, tp: TensorGroup) -> Tensor:
    """`x` [..., K / size] concatenated over the group to [..., K], on every rank."""
    return x if tp.size == 1 else cast(Tensor, _Gather.apply(x, tp))


def vocab_parallel_embedding(ids: Tensor, table: Tensor, tp: TensorGroup) -> Tensor:
    """This rank's part of the rows of an embedding table whose rows (the vocabulary) are split over the group.

    Args:
        ids: int64 [T], token ids in [0, V).
        table: [V / size, D], this rank's rows.
        tp: the tensor-parallel group.

    Returns:
        [T, D], zeros where another rank has the row: the sum over the group (`leave_rows`) is the embedding.
    """
    if tp.size == 1:
        return F.embedding(ids, table)
    rows = table.shape[0]
    mine = ids - tp.rank * rows
    elsewhere = (mine < 0) | (mine >= rows)
    return F.embedding(mine.masked_fill(elsewhere, 0), table).masked_fill(elsewhere.unsqueeze(-1), 0.0)


class _VocabParallelCrossEntropy(torch.autograd.Function):
    """Cross entropy of logits split by vocabulary, with a single all-reduce.

    Each rank contributes the log-sum-exp of its own logits and the target's logit where it owns it. The log-sum-exps
    are stacked by rank rather than summed, so no earlier reduction has to find a common maximum.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, tp: TensorGroup) -> Tensor:
        columns = logits.shape[-1]
        mine = targets - tp.rank * columns
        elsewhere = (mine < 0) | (mine >= columns)
        mine = mine.masked_fill(elsewhere, 0).unsqueeze(-1)
        stacked = logits.new_zeros(tp.size + 1, logits.shape[0])
        stacked[tp.rank] = logits.logsumexp(-1)
        stacked[-1] = logits.gather(-1, mine).squeeze(-1).masked_fill(elsewhere, 0.0)
        tp.all_reduce(stacked)
        log_total = stacked[:-1].logsumexp(0)
        counted = targets != IGNORED
        ctx.save_for_backward(logits, log_total, mine, elsewhere, counted)
        return (log_total - stacked[-1]).masked_fill(~counted, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        logits, log_total, mine, elsewhere, counted = ctx.saved_tensors
        grad = (logits - log_total.unsqueeze(-1)).exp_()
        grad.scatter_add_(-1, mine, elsewhere.to(grad.dtype).sub_(1.0).unsqueeze(-1))
        return grad.mul_((counted * grads[0]).unsqueeze(-1)), None, None


def vocab_parallel_cross_entropy(logits: Tensor, targets: Tensor, tp: TensorGroup) -> Tensor:
    """Sum of the cross entropies over positions that have a target. One all-reduce forward, none backward.

    Args:
        logits: [T, V / size], this rank's columns; computed in at least float32.
        targets: int64 [T], token ids in [0, V), or -100 for no target.
        tp: the tensor-parallel group.

    Returns:
        A scalar in at least float32, the same on every rank.
    """
    logits = logits.to(at_least_float32(logits.dtype))
    if tp.size == 1:
        return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    return cast(Tensor, _VocabParallelCrossEntropy.apply(logits, targets, tp))
