"""Sums of coded gradients: every rank sums one chunk and sends the sum to all.

The two rounds are those of 1-bit Adam's compressed all-reduce (Tang et al. 2021, section 4): bytes do not grow with the
number of ranks, and all ranks end with equal bits on any backend, because each sum is formed by one rank, in the order
of the ranks, and everybody decodes the same payload.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from mmlab.parallel.compression.codecs import Codec
from mmlab.parallel.compression.feedback import Kept
from mmlab.parallel.compression.wire import Wire


def cut(flat: Tensor, ranks: int, align: int) -> list[Tensor]:
    """One chunk of `flat` [numel] for each rank: equal multiples of `align`, but the last ones short or empty."""
    share = -(-flat.numel() // (ranks * align)) * align
    return [flat[min(i * share, flat.numel()) : min((i + 1) * share, flat.numel())] for i in range(ranks)]


def slot(codec: Codec, count: int) -> int:
    """Bytes that the payload of `count` elements takes on the wire: every payload begins at a multiple of 8, so that
    scales and indices in it can be read in place."""
    return -(-codec.size(count) // 8) * 8 if count else 0


def handed_over(codec: Codec, count: int, ranks: int, rank: int) -> int:
    """Bytes that `reduce_coded` hands to collectives on a rank for `count` elements: the chunks of the others, then the
    sum of its own, which is as long as the longest."""
    share = -(-count // (ranks * codec.align)) * codec.align
    lengths = [max(0, min(share, count - r * share)) for r in range(ranks)]
    return sum(slot(codec, length) for r, length in enumerate(lengths) if r != rank) + slot(codec, share)


def _coded(codec: Codec, x: Tensor, payload: Tensor, lost: Tensor | None) -> None:
    """Encode x; `lost` [as x] becomes what the payload lacks. What is not finite never enters it."""
    if not x.numel():
        return
    codec.encode(x, payload[: codec.size(x.numel())])
    if lost is not None:
        codec.decode(payload[: codec.size(x.numel())], lost)
        torch.sub(x, lost, out=lost).nan_to_num_(0.0, 0.0, 0.0)


def scatter_coded(chunks: list[Tensor], codec: Codec, wire: Wire, lost: list[Tensor] | None) -> Iterator[dist.Work]:
    """The first round: this rank's chunk becomes the sum of everybody's. `chunks[r]` is what rank r sums.

    What this rank sends is coded, its own part of its own chunk is not. `lost[r]` becomes what coding has lost.
    """
    me = wire.rank
    others = [r for r in range(wire.ranks) if r != me]
    sizes = [slot(codec, chunk.numel()) if r != me else 0 for r, chunk in enumerate(chunks)]
    own = slot(codec, chunks[me].numel())
    sent = chunks[me].new_empty(sum(sizes), dtype=torch.uint8)
    received = sent.new_empty(own * len(others))
    for r, payload in enumerate(sent.split(sizes)):
        if r != me:
            _coded(codec, chunks[r], payload, lost[r] if lost else None)
    yield wire.all_to_all(received, [own if r != me else 0 for r in range(wire.ranks)], sent, sizes)
    if not own:
        return
    parts = dict(zip(others, received.split(own), strict=True))
    total, part = torch.zeros_like(chunks[me]), torch.empty_like(chunks[me])
    for r in range(wire.ranks):
        if r == me:
            total.add_(chunks[me])
        else:
            codec.decode(parts[r][: codec.size(part.numel())], part)
            total.add_(part)
    chunks[me].copy_(total)


def reduce_coded(flat: Tensor, kept: Kept | None, codec: Codec, wire: Wire, unit: float) -> Iterator[dist.Work]:
    """Sum `flat` [numel] over the group, in place; yields what is to be waited for before the next call.

    With `kept` there is error feedback: the residual is added first, and what coding loses is kept in it, by the sender
    for chunks of others, by the rank that sums for the coded sum. So the reduced gradients and all residuals together
    are at every step exactly the gradients and residuals that went in. `unit`: what the gradients are multiplied by.
    """
    lost: Tensor | None = None
    if kept is not None:
        kept.correct(flat, unit)
        lost = kept.room(flat)
    chunks = cut(flat, wire.ranks, codec.align)
    losses = None if lost is None else cut(lost, wire.ranks, codec.align)
    yield from scatter_coded(chunks, codec, wire, losses)
    longest = slot(codec, chunks[0].numel())
    payload = torch.zeros(longest, dtype=torch.uint8, device=flat.device)
    _coded(codec, chunks[wire.rank], payload, losses[wire.rank] if losses else None)
    gathered = payload.new_empty(longest * wire.ranks)
    yield wire.all_gather(gathered, payload)
    for chunk, coded in zip(chunks, gathered.split(longest), strict=True):
        if chunk.numel():
            codec.decode(coded[: codec.size(chunk.numel())], chunk)
    if lost is not None and unit != 1.0:
        lost.mul_(1.0 / unit)
