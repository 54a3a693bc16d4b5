"""What ranks of a pool compute in the tests of context parallelism."""

from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from mmlab.parallel.context.blocks import attention_plan
from mmlab.parallel.context.ring import ring_attention
from mmlab.parallel.context.split import ContextGroup, Pack, split
from mmlab.parallel.context.ulysses import heads_here, tokens_here

HEADS, KV_HEADS, WIDTH = 4, 2, 8


def join(rank: int, world: int, host: str, port: int, backend: str = "gloo") -> dist.ProcessGroup:
    limit = timedelta(seconds=30)
    store = dist.TCPStore(host, port, is_master=False, timeout=limit)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    return dist.group.WORLD


def attention_mask(seqlens, window):
    """bool [T, T]: the plain mask of a pack."""
    sequence = torch.repeat_interleave(torch.arange(len(seqlens)), torch.tensor(seqlens))
    at = torch.arange(len(sequence))
    back = at[:, None] - at[None, :]
    mask = (sequence[:, None] == sequence[None, :]) & (back >= 0)
    return mask & (back < window) if window else mask


def whole(seqlens, dtype, window, seed=0):
    """Inputs of the whole pack, the plain attention's output, and gradients for a given output gradient."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(seqlens)
    make = lambda heads: torch.randn(total, heads, WIDTH, generator=generator, dtype=torch.float64).to(dtype)  # noqa: E731
    q, k, v = (make(heads).requires_grad_() for heads in (HEADS, KV_HEADS, KV_HEADS))
    grad = make(HEADS)
    mask = attention_mask(seqlens, window)
    k_all, v_all = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1), k_all.transpose(0, 1), v_all.transpose(0, 1), attn_mask=mask
    ).transpose(0, 1)
    out.backward(grad)
    return (q, k, v), grad, out.detach()


def relative(a, b):
    """||a - b|| / ||b||; a token that sees only itself has q and k gradients of zero, so at least 1 below the line."""
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1.0)) if b.numel() else 0.0


def _own_inputs(inputs, rows):
    return [x.detach()[rows].clone().requires_grad_() for x in inputs]


def _sum_over(grads, rows, total):
    """Gradients of this rank's tokens, put into the pack and summed over the ranks."""
    wide = torch.zeros(total, *grads.shape[1:], dtype=torch.float64)
    wide.index_add_(0, rows, grads.double())
    dist.all_reduce(wide)
    return wide


def attention(rank, world, host, port, cases) -> list[dict]:
    """Cases of {seqlens, images, patches, mode, scope, window, dtype}: relative errors against plain attention."""
    group = join(rank, world, host, port)
    return [_case(ContextGroup(group, rank, world, case["mode"], case["scope"]), **case) for case in cases]


def _case(group, seqlens, images, patches, mode, scope, window, dtype) -> dict:
    inputs, grad, wanted = whole(seqlens, dtype, window)
    cut = split(Pack(tuple(seqlens), np.array(images, dtype=np.int64), patches), group)
    rows = torch.from_numpy(cut.rows[group.rank])
    q, k, v = _own_inputs(inputs, rows)
    if mode == "ulysses":
        counts = [len(r) for r in cut.rows]
        q_all, k_all, v_all = heads_here(q, k, v, counts, group)
        k_all, v_all = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k_all, v_all))
        mixed = F.scaled_dot_product_attention(
            q_all.transpose(0, 1),
            k_all.transpose(0, 1),
            v_all.transpose(0, 1),
            attn_mask=attention_mask(seqlens, window),
        )
        out = tokens_here(mixed.transpose(0, 1).flatten(1), counts, group).unflatten(1, (HEADS, WIDTH))
        plan = None
    else:
        plan = attention_plan(seqlens, cut, group, window)
        out = ring_attention(q, k, v, plan, group)
    # A shared token's output gradient comes in parts from the ranks; here all of it from the rank that counts it.
    counted = torch.from_numpy(cut.counted[group.rank])
    out.backward(grad[rows] * counted.view(-1, 1, 1).to(grad.dtype))
    total = sum(seqlens)
    errors = {"out": relative(out.detach(), wanted[rows])}
    for name, own, plain in zip("qkv", (q, k, v), inputs, strict=True):
        errors[name] = relative(_sum_over(own.grad, rows, total), plain.grad)
    if plan is not None:
        errors["rows_sent"] = sum(len(e.wanted) for e in plan.exchanges)
        errors["rows_skipped"] = sum(e.skipped for e in plan.exchanges)
        errors["transfers"] = sum(1 for e in plan.exchanges if len(e.wanted))
    return errors
