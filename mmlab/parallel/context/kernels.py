"""Attention of a batch of blocks with its log-sum-exp, and its backward from the log-sum-exp of the whole attention.

FlashAttention (Dao et al. 2022): the probabilities of a block are exp(scores - lse), so a block's part of the backward
needs only the final output and log-sum-exp, whoever computed the other blocks.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mmlab.parallel.tensor import at_least_float32

_aten = torch.ops.aten


def _bias(mask: Tensor | None, like: Tensor) -> Tensor | None:
    """bool [Lq, Lk] to what is added to the scores."""
    return (
        None
        if mask is None
        else torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill_(~mask, -math.inf)
    )


def _on_cuda(q: Tensor, mask: Tensor | None) -> bool:
    """Whether CUDA's flash kernel takes this: half precision, no mask, heads of at most 256."""
    return q.is_cuda and mask is None and q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= 256


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention over the given keys alone.

    Args:
        q: [B, H, Lq, Dh].
        k: [B, G, Lk, Dh]; G divides H (grouped queries).
        v: as `k`.
        causal: whether query i sees keys 0..i only (Lq == Lk).
        mask: bool [Lq, Lk], True where a query sees a key; a query may see none.

    Returns:
        (output [B, H, Lq, Dh] in the format of q, log-sum-exp [B, H, Lq] in at least float32; minus infinity for a
        query that sees nothing).
    """
    if q.device.type == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=_bias(mask, q))
    elif _on_cuda(q, mask):
        k, v = _repeat(k, q), _repeat(v, q)
        out, lse = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    else:
        out, lse = _plain(q, k, v, causal, mask)
    if mask is not None:
        # The CPU kernel returns 0, not minus infinity, for a query that sees no key.
        lse = lse.masked_fill(~mask.any(-1), -math.inf)
    return out, lse


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v through one batch of blocks.

    `out` [B, H, Lq, Dh] and `lse` [B, H, Lq] are those of the whole attention, of which this batch is a part, and
    `grad` is the gradient of that output; the others as in `attend`.
    """
    if q.device.type == "cpu":
        found: tuple[Tensor, Tensor, Tensor] = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=_bias(mask, q)
        )
        return found
    if _on_cuda(q, mask):
        seed = torch.zeros(2, dtype=torch.int64, device=q.device)
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            grad, q, _repeat(k, q), _repeat(v, q), out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, seed
        )
        return dq, _sum_heads(dk, k), _sum_heads(dv, k)
    return _plain_backward(grad, q, k, v, out, lse, causal, mask)


def _repeat(k: Tensor, q: Tensor) -> Tensor:
    """[B, G, L, Dh] -> [B, H, L, Dh]: each key/value head for its group of query heads."""
    return k if k.shape[1] == q.shape[1] else k.repeat_interleave(q.shape[1] // k.shape[1], 1)


def _sum_heads(grad: Tensor, k: Tensor) -> Tensor:
    """The transpose of `_repeat`."""
    return grad.unflatten(1, (k.shape[1], -1)).sum(2) if grad.shape[1] != k.shape[1] else grad


def _scores(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None) -> Tensor:
    wide = at_least_float32(q.dtype)
    scores = q.to(wide) @ k.to(wide).transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril_()
    return scores if mask is None else scores.masked_fill(~mask, -math.inf)


def _plain(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """What the kernels compute, for formats and masks that none takes."""
    k, v = _repeat(k, q), _repeat(v, q)
    scores = _scores(q, k, causal, mask)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().nan_to_num_(0.0)
    return (weights @ v.to(weights.dtype)).to(q.dtype), lse


def _plain_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = _repeat(k, q), _repeat(v, q)
    weights = (_scores(q, keys, causal, mask) - lse.unsqueeze(-1)).exp()
    wide = weights.dtype
    grad_wide, scale = grad.to(wide), q.shape[-1] ** -0.5
    dv = weights.transpose(-1, -2) @ grad_wide
    delta = (grad_wide * out.to(wide)).sum(-1, keepdim=True)
    ds = weights * (grad_wide @ values.to(wide).transpose(-1, -2) - delta) * scale
    dq, dk = ds @ keys.to(wide), ds.transpose(-1, -2) @ q.to(wide)
    return dq.to(q.dtype), _sum_heads(dk, k).to(k.dtype), _sum_heads(dv, k).to(v.dtype)
