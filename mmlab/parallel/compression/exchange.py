"""Sums of coded gradients: every rank sums one chunk and sends the sum to all.

The two rounds are those of 1-bit Adam's compressed all-reduce (Tang et al. 2021, section 4): bytes do not grow with the
number of ranks, and all ranks end with equal bits on any backend, because each sum is formed by one rank, in the order
of the ranks, and everybody decodes the same payload.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mmlab.parallel.compression.codecs import Codec
from mmlab.parallel.compression.wire import Wire


def lengths(count: int, ranks: int, align: int) -> list[int]:
    """Elements that each rank sums, of `count`: equal multiples of `align`, but the last ones short or none."""
    share = -(-count // (ranks * align)) * align
    return [max(0, min(share, count - r * share)) for r in range(ranks)]


def cut(flat: Tensor, ranks: int, align: int) -> list[Tensor]:
    """One chunk of `flat` [numel] for each rank."""
    return list(flat.split(lengths(flat.numel(), ranks, align)))


def slot(codec: Codec, count: int) -> int:
    """Bytes that the payload of `count` elements takes on the wire: every payload begins at a multiple of 8, so that
    scales and indices in it can be read in place."""
    return -(-codec.size(count) // 8) * 8 if count else 0


def handed_over(codec: Codec, count: int, ranks: int, rank: int) -> int:
    """Bytes that `reduce_coded` hands to collectives on a rank for `count` elements: the chunks of the others, then the
    sum of its own, which is as long as the longest."""
    slots = [slot(codec, length) for length in lengths(count, ranks, codec.align)]
    return sum(slots) - slots[rank] + slots[0]


def _encode(codec: Codec, x: Tensor, payload: Tensor) -> None:
    if x.numel():
        codec.encode(x, payload[: codec.size(x.numel())])


def _decode(codec: Codec, payload: Tensor, out: Tensor) -> None:
    if out.numel():
        codec.decode(payload[: codec.size(out.numel())], out)


def _subtract(x: Tensor, decoded: Tensor, out: Tensor) -> None:
    """What a payload lacks of x. What is not finite never enters it."""
    torch.sub(x, decoded, out=out).nan_to_num_(0.0, 0.0, 0.0)


def scatter_coded(chunks: list[Tensor], codec: Codec, wire: Wire, lost: list[Tensor] | None) -> Iterator[dist.Work]:
    """The first round: this rank's chunk becomes the sum of everybody's. `chunks[r]` is what rank r sums.

    What this rank sends is coded, its own part of its own chunk is not. `lost[r]` becomes what coding has lost of chunk
    r, for all r but this rank's; it is found while the payloads travel.
    """
    me = wire.rank
    others = [r for r in range(wire.ranks) if r != me]
    sizes = [slot(codec, chunk.numel()) if r != me else 0 for r, chunk in enumerate(chunks)]
    own = slot(codec, chunks[me].numel())
    sent = chunks[me].new_empty(sum(sizes), dtype=torch.uint8)
    received = sent.new_empty(own * len(others))
    payloads = sent.split(sizes)
    for r in others:
        _encode(codec, chunks[r], payloads[r])
    work = wire.all_to_all(received, [own if r != me else 0 for r in range(wire.ranks)], sent, sizes)
    if lost is not None:
        for r in others:
            _decode(codec, payloads[r], lost[r])
            _subtract(chunks[r], lost[r], lost[r])
    yield work
    if own:
        _add_in_order(chunks[me], received.split(own), codec, me)


def _add_in_order(chunk: Tensor, payloads: Sequence[Tensor], codec: Codec, me: int) -> None:
    """Make `chunk`, this rank's part, the sum of all parts in the order of the ranks; `payloads` are the others'."""
    part = torch.empty_like(chunk)
    if me:
        before = torch.empty_like(chunk)
        _decode(codec, payloads[0], before)
        for payload in payloads[1:me]:
            _decode(codec, payload, part)
            before.add_(part)
        chunk.add_(before)
    for payload in payloads[me:]:
        _decode(codec, payload, part)
        chunk.add_(part)


def gather_coded(chunks: list[Tensor], codec: Codec, wire: Wire, lost: Tensor | None) -> Iterator[dist.Work]:
    """The second round: every chunk becomes, on all ranks, what its owner's payload decodes to. `lost` [as this rank's
    chunk] becomes what coding that has lost."""
    own, longest = chunks[wire.rank], slot(codec, chunks[0].numel())
    payload = torch.zeros(longest, dtype=torch.uint8, device=own.device)
    _encode(codec, own, payload)
    gathered = payload.new_empty(longest * wire.ranks)
    work = wire.all_gather(gathered, payload)
    if lost is not None:
        lost.copy_(own)
    _decode(codec, payload, own)
    if lost is not None:
        _subtract(lost, own, lost)
    yield work
    for r, coded in enumerate(gathered.split(longest)):
        if r != wire.rank:
            _decode(codec, coded, chunks[r])


def reduce_coded(flat: Tensor, lost: Tensor | None, codec: Codec, wire: Wire, unit: float) -> Iterator[dist.Work]:
    """Sum `flat` [numel] over the group, in place; yields what is to be waited for before the next call.

    `lost` [as flat] becomes what coding loses: of chunks of others on the sender, of the coded sum on the rank that
    sums. So what is reduced and what is lost on all ranks together are exactly what went in. `unit`: what the gradients
    are multiplied by, and `lost` is not.
    """
    chunks = cut(flat, wire.ranks, codec.align)
    losses = None if lost is None else cut(lost, wire.ranks, codec.align)
    yield from scatter_coded(chunks, codec, wire, losses)
    yield from gather_coded(chunks, codec, wire, losses[wire.rank] if losses else None)
    if lost is not None and unit != 1.0:
        lost.mul_(1.0 / unit)
