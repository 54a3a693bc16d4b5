"""Codecs: how a run of gradients becomes bytes and comes back. Pure functions of their input, without state.

What is not finite never looks finite: where an element is NaN or infinite, something of what the payload decodes to is
not finite either, so that every rank sees it in the sum. A codec writes C(x) for what x decodes to.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil
from typing import Protocol

import torch
from torch import Tensor


class Codec(Protocol):
    """A number format for gradients on the wire.

    `align`: a run of gradients is cut for several ranks at multiples of so many elements.
    """

    align: int

    def size(self, count: int) -> int:
        """Bytes of the payload of `count` elements."""

    def encode(self, x: Tensor, out: Tensor) -> None:
        """Write the payload of x [count], float32 or float64, into `out` [size(count)], uint8."""

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Write the elements of a payload [size(count)], uint8, into `out` [count], float32 or float64."""


class Plain:
    """The values as they are, in float32 or in float64."""

    align = 1

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def size(self, count: int) -> int:
        """4 or 8 bytes an element."""
        return count * self.dtype.itemsize

    def encode(self, x: Tensor, out: Tensor) -> None:
        """Copy the bytes."""
        out.copy_(x.view(torch.uint8))

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Copy the bytes."""
        out.view(torch.uint8).copy_(payload)


class Bf16:
    """bfloat16, rounded to nearest: |x - C(x)| <= 2^-8 |x| for what is not denormal."""

    align = 1

    def size(self, count: int) -> int:
        """2 bytes an element."""
        return 2 * count

    def encode(self, x: Tensor, out: Tensor) -> None:
        """Convert."""
        out.view(torch.bfloat16).copy_(x)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Convert."""
        out.copy_(payload.view(torch.bfloat16))


class Fp16:
    """float16 times a power of two that brings the largest magnitude to [2^14, 2^15), so that nothing overflows.

    |x - C(x)| <= 2^-11 |x| down to 2^-28 of the largest magnitude, below it 2^-39 of the largest (float16's denormals).
    The scale is what loss scaling does for a whole model (Micikevicius et al. 2018, "Mixed Precision Training", section
    3.2), here for each run of gradients by itself. Payload: the scale, float32; the elements.
    """

    align = 1

    def size(self, count: int) -> int:
        """4 bytes and 2 an element."""
        return 4 + 2 * count if count else 0

    def encode(self, x: Tensor, out: Tensor) -> None:
        """Scale exactly, round to nearest."""
        if not x.numel():
            return
        low, high = torch.aminmax(x)
        exponent = torch.frexp(torch.maximum(-low, high)).exponent
        # The bits of 2^(15 - exponent); its inverse is no denormal either, and 2^126 lifts float32's smallest number.
        bits = ((15 - exponent).clamp_(-126, 126) + 127) << 23
        scale = out[:4].view(torch.float32)
        scale.copy_(bits.view(torch.float32))
        out[4:].view(torch.float16).copy_(x * scale)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Convert, undo the scale exactly."""
        if out.numel():
            out.copy_(payload[4:].view(torch.float16)).mul_(payload[:4].view(torch.float32).reciprocal())


def _rows(x: Tensor, block: int) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of x [count] as matrices, with the rows they have among all blocks: the full ones, then a short last."""
    full = x.numel() // block
    if full:
        yield slice(0, full), x[: full * block].view(full, block)
    if full * block < x.numel():
        yield slice(full, full + 1), x[full * block :].view(1, -1)


class Int8:
    """8-bit integers in blocks of 256 with a scale each: the largest magnitude of a block is 127.

    Blocks as in Dettmers et al. 2022, "8-bit Optimizers via Block-wise Quantization", section 2.1 (of 2,048 there): a
    large element costs its own block its precision, no other. Rounded to nearest: |x - C(x)| <= scale / 2 = largest of
    the block / 254, to rounding, so ||x - C(x)||^2 <= 256 / 254^2 ||x||^2 (a block's largest is at most its norm).
    Payload: scales, float32; elements, int8.
    """

    align = 256
    _least = torch.finfo(torch.float32).tiny
    """No scale is less: zeros and denormals need no division by zero, and lose at most half of it."""

    def size(self, count: int) -> int:
        """4 bytes a block and 1 an element."""
        return 4 * -(-count // self.align) + count

    def _parts(self, payload: Tensor, count: int) -> tuple[Tensor, Tensor]:
        scales, elements = payload.split([self.size(count) - count, count])
        return scales.view(torch.float32), elements.view(torch.int8)

    def encode(self, x: Tensor, out: Tensor) -> None:
        """Divide by the scale, round to nearest. A block with NaN or infinity has that scale."""
        scales, elements = self._parts(out, x.numel())
        for (mine, rows), (_, coded) in zip(_rows(x, self.align), _rows(elements, self.align), strict=True):
            scaled = rows.abs()
            scale = scales[mine].copy_(scaled.amax(1).mul_(1 / 127)).clamp_(min=self._least)
            torch.mul(rows, scale.reciprocal()[:, None], out=scaled)
            coded.copy_(scaled.round_().clamp_(-127, 127))

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Multiply by the scale."""
        scales, elements = self._parts(payload, out.numel())
        out.copy_(elements)
        for mine, rows in _rows(out, self.align):
            rows.mul_(scales[mine, None])


class OneBit:
    """The signs, and for each block the mean magnitude: C(x) = mean |x| sign(x); the sign of 0 is +.

    Seide et al. 2014, "1-Bit Stochastic Gradient Descent", with the scale of Karimireddy et al. 2019, "Error Feedback
    Fixes SignSGD", algorithm 1. A contraction (their section 4): of a block of n elements
    ||x - C(x)||^2 = (1 - ||x||_1^2 / (n ||x||^2)) ||x||^2. One scale for all, as in 1-bit Adam (Tang et al. 2021), does
    not fit a bucket of many tensors (DECISIONS.md). Payload: scales, float32; signs, 8 to a byte, of elements
    i, m + i, 2 m + i, ... in byte i of m, the highest bit first, so that all work is on contiguous runs.
    """

    align = 256

    def size(self, count: int) -> int:
        """4 bytes a block and 1 for 8 elements."""
        return 4 * -(-count // self.align) + -(-count // 8)

    def _parts(self, payload: Tensor, count: int) -> tuple[Tensor, Tensor]:
        scales, signs = payload.split([4 * -(-count // self.align), -(-count // 8)])
        return scales.view(torch.float32), signs

    def encode(self, x: Tensor, out: Tensor) -> None:
        """Scales by block, then all signs."""
        scales, signs = self._parts(out, x.numel())
        for mine, rows in _rows(x, self.align):
            scales[mine] = rows.abs().mean(1)
        integers, width = (torch.int32, 31) if x.element_size() == 4 else (torch.int64, 63)
        negative = signs.new_zeros(8, signs.numel())
        negative.view(-1)[: x.numel()] = x.view(integers) >> width  # all bits where negative
        signs.copy_((negative & 128).bitwise_right_shift_(_eight(x)).sum(0, dtype=torch.uint8))

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Signs, then the scales under them."""
        scales, signs = self._parts(payload, out.numel())
        negative = (signs << _eight(out)).view(torch.int8).bitwise_right_shift_(7)  # -1 or 0
        out.copy_(negative.bitwise_or_(1).view(-1)[: out.numel()])
        for mine, rows in _rows(out, self.align):
            rows.mul_(scales[mine, None])


def _eight(like: Tensor) -> Tensor:
    """How far the bit of each of eight runs is from the highest one, [8, 1]."""
    return torch.arange(8, dtype=torch.uint8, device=like.device)[:, None]


class TopK:
    """The k = ceil(ratio n) elements of largest magnitude, at least one, and where they are; the others are zero.

    Aji & Heafield 2017, "Sparse Communication for Distributed Gradient Descent"; Alistarh et al. 2018 and Stich et al.
    2018, "Sparsified SGD with Memory", section 2: ||x - C(x)||^2 <= (1 - k/n) ||x||^2. NaN counts as largest. Payload:
    values, float32; indices, int32.
    """

    align = 1

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio

    def kept(self, count: int) -> int:
        """How many of `count` elements are sent."""
        return min(count, max(1, ceil(self.ratio * count)))

    def size(self, count: int) -> int:
        """8 bytes for each element that is sent."""
        return 8 * self.kept(count)

    def _parts(self, payload: Tensor) -> tuple[Tensor, Tensor]:
        half = payload.numel() // 2
        return payload[:half].view(torch.float32), payload[half:].view(torch.int32)

    def encode(self, x: Tensor, out: Tensor) -> None:
        """Select."""
        values, indices = self._parts(out)
        chosen = largest(x.abs(), values.numel())
        values.copy_(x[chosen])
        indices.copy_(chosen)

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Zeros, and the values in their places."""
        values, indices = self._parts(payload)
        out.zero_().scatter_(0, indices.long(), values.to(out.dtype))


SAMPLED = 61
"""One of so many elements is looked at for a threshold: a prime, so that all columns of a matrix are met."""


def largest(magnitudes: Tensor, k: int) -> Tensor:
    """Where the k largest of `magnitudes` [count] are, exactly: int64 [k], in no order; NaN counts as largest.

    On CPU torch.topk of half a million elements takes 3.8 ms at 1 %. So first a threshold is guessed from a sample (Lin
    et al. 2018, "Deep Gradient Compression", section 5), such that twice as many elements as needed are above it; those
    are then ranked. Where the guess was too high, all are.
    """
    sample = magnitudes[::SAMPLED]
    wanted = 2 * k // SAMPLED + 8
    if magnitudes.device.type == "cpu" and 4 * wanted < sample.numel():
        threshold = sample.topk(wanted, sorted=False).values.min()
        candidates = torch.lt(magnitudes, threshold).logical_not_().nonzero().squeeze(1)  # NaN is not less
        if candidates.numel() >= k:
            return candidates[magnitudes.index_select(0, candidates).topk(k, sorted=False).indices]
    return magnitudes.topk(k, sorted=False).indices
