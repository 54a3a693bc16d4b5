"""DeepSpeed-Ulysses (Jacobs et al. 2023): tokens of all ranks and a share of the heads, while attention is computed.

Two all-to-alls around an attention that knows nothing of it: q, k and v together on the way in, the output on the way
out; the same two backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from mmlab.parallel.context.split import ContextGroup


def _exchange(parts: Tensor, leaving: Sequence[int], arriving: Sequence[int], group: ContextGroup) -> Tensor:
    """All-to-all of rows: `leaving[c]` rows of `parts` go to rank c, `arriving[c]` come from it."""
    found = parts.new_empty(sum(arriving), *parts.shape[1:])
    group.count("cp", parts, len(parts) - leaving[group.rank])
    dist.all_to_all_single(found, parts.contiguous(), list(arriving), list(leaving), group=group.group)
    return found


def _to_heads(x: Tensor, counts: Sequence[int], group: ContextGroup) -> Tensor:
    """[T_c, cp, W] -> [T, W]: this rank's share of the width, for the tokens of all ranks."""
    own = counts[group.rank]
    return _exchange(x.transpose(0, 1).flatten(0, 1), [own] * group.size, counts, group)


def _to_tokens(x: Tensor, counts: Sequence[int], group: ContextGroup) -> Tensor:
    """[T, W] -> [T_c, cp, W]: the way back."""
    own = counts[group.rank]
    return _exchange(x, counts, [own] * group.size, group).unflatten(0, (group.size, own)).transpose(0, 1)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Sequence[int], group: ContextGroup) -> Tensor:
        ctx.counts, ctx.group = counts, group
        return _to_heads(x, counts, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _to_tokens(grads[0], ctx.counts, ctx.group), None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: Sequence[int], group: ContextGroup) -> Tensor:
        ctx.counts, ctx.group = counts, group
        return _to_tokens(x, counts, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _to_heads(grads[0], ctx.counts, ctx.group), None, None


def heads_here(
    q: Tensor, k: Tensor, v: Tensor, counts: Sequence[int], group: ContextGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """q [T_c, H, Dh], k and v [T_c, G, Dh] -> [T, H / cp, Dh] and twice [T, G / cp, Dh]; H and G multiples of cp.

    `counts[c]`: tokens of rank c; T is their sum, and rank c's tokens come after those of the ranks before it.
    """
    size, width = group.size, q.shape[-1]
    shares = [x.unflatten(1, (size, -1)) for x in (q, k, v)]  # [T_c, cp, heads / cp, Dh]
    heads = [share.shape[2] for share in shares]
    mixed = cast(Tensor, _ToHeads.apply(torch.cat(shares, 2).flatten(2), counts, group))
    q, k, v = mixed.unflatten(1, (-1, width)).split(heads, 1)
    return q, k, v


def tokens_here(x: Tensor, counts: Sequence[int], group: ContextGroup) -> Tensor:
    """[T, W] of this rank's heads -> [T_c, cp * W], the heads of all ranks in order, for this rank's tokens."""
    return cast(Tensor, _ToTokens.apply(x, counts, group)).flatten(1)
