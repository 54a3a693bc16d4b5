"""The collectives, as rounds over slots.

In round r a rank writes its slot r mod 2, raises its flag to r, waits for the
flags of those it reads from, and reads their slots. A slot is written again two
rounds later, by when all flags have reached r + 1: everybody has entered the
next round and so has finished reading this one. Large tensors take as many
rounds as they need. Sums are formed in the order of the ranks on every rank,
so all have equal bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmlab.messages import shared_file as at
from mmlab.parallel.shm.segment import Segment
from mmlab.parallel.shm.work import PeerLost, Steps

EVERYONE = -1
LINE = 64
"""Bytes of a cache line: parts of a slot begin at one, for a copy across lines was up to twice as slow."""
WHOLE = 256 << 10
"""Bytes up to which every rank of three or more reduces all of a tensor: one round instead of two."""
_KINDS: Any = dist.ReduceOp.RedOpType
_NAMES = {
    _KINDS.SUM: "sum", _KINDS.AVG: "avg", _KINDS.PRODUCT: "product", _KINDS.MIN: "min", _KINDS.MAX: "max",
    _KINDS.BAND: "band", _KINDS.BOR: "bor", _KINDS.BXOR: "bxor",
}  # fmt: skip
_PAIRWISE: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add, "avg": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum,
    "band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor,
}  # fmt: skip
_LOGICAL = {"sum": "bor", "max": "bor", "avg": "band", "min": "band", "product": "band"}


def op_name(op: dist.ReduceOp | dist.ReduceOp.RedOpType) -> str:
    """sum, avg, product, min, max, band, bor or bxor."""
    name = _NAMES.get(getattr(op, "op", op))
    if name is None:
        raise ValueError(f"shm: the reduction {op} is not supported; use sum, avg, product, min, max or a bitwise one")
    return name


def reduce_into(out: Tensor, parts: list[Tensor], op: str) -> None:
    """Reduce tensors of equal shape in the order of the list; halves of floats are summed in float32."""
    if out.dtype == torch.bool:
        op = _LOGICAL.get(op, op)
    pairwise = _PAIRWISE[op]
    if len(parts) > 2 and op in ("sum", "avg", "product") and out.dtype in (torch.bfloat16, torch.float16):
        total = parts[0].float()
        for part in parts[1:]:
            pairwise(total, part, out=total)
        out.copy_(total.div_(len(parts)) if op == "avg" else total)
        return
    if len(parts) == 1:
        out.copy_(parts[0])
    else:
        pairwise(parts[0], parts[1], out=out)
    for part in parts[2:]:
        pairwise(out, part, out=out)
    if op == "avg":
        out.div_(len(parts), rounding_mode=None if out.is_floating_point() else "trunc")


class Collectives:
    """One rank's side of every collective of a group; tensors are flat, contiguous and without autograd."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        self.size, self.rank = segment.layout.ranks, segment.rank
        self.round = 0
        self._slots: dict[tuple[int, int, torch.dtype], Tensor] = {}

    def slot(self, rank: int, dtype: torch.dtype) -> Tensor:
        """The slot of a rank in the present round."""
        key = (rank, self.round & 1, dtype)
        found = self._slots.get(key)
        if found is None:
            assert self.segment.tensor is not None
            start = self.segment.layout.slot_at(rank, key[1])
            found = self.segment.tensor[start : start + self.segment.layout.slot].view(dtype)
            self._slots[key] = found
        return found

    def close(self) -> None:
        """Drop the views of the slots."""
        self._slots.clear()

    def _begin(self) -> tuple[int, int]:
        """Begin a round in which this rank writes; yield the result, to wait until its slot is free."""
        self.round += 1
        return EVERYONE, self.round - 1

    def _write(self, sign: int | None, data: Tensor) -> None:
        """Put data at the start of this rank's slot and raise its flag."""
        if data.numel():
            self.slot(self.rank, data.dtype)[: data.numel()].copy_(data)
        self._post(sign)

    def _post(self, sign: int | None) -> None:
        """Raise this rank's flag; sign the first round of a call."""
        words, me = self.segment.words, self.segment.me
        if sign is not None:
            words[me + at.SIGNATURES + (sign >> 48 & 1)] = sign
        words[me + at.FLAG] = self.round
        self.segment.ring_bells()

    def _check(self, sign: int | None, ranks: list[int]) -> None:
        """See that the others made the same call."""
        if sign is None:
            return
        words = self.segment.words
        for rank in ranks:
            theirs = words[self.segment.layout.block(rank) + at.SIGNATURES + (sign >> 48 & 1)]
            if theirs != sign:
                mine = f"{at.OPS[sign >> 43 & 31]} of {sign & (1 << 43) - 1} bytes"
                other = f"{at.OPS[theirs >> 43 & 31]} of {theirs & (1 << 43) - 1} bytes"
                world = words[at.GLOBAL + rank]
                if theirs >> 48 != sign >> 48:
                    other = "another call"
                raise PeerLost(f"shm: the ranks do not make the same calls: peer rank {world}: {other}, here: {mine}")

    @staticmethod
    def _sign(number: int | None, op: str, bytes_: int) -> int | None:
        if number is None:  # a later part of a call of several
            return None
        return (number & 0x7FFF) << 48 | at.OPS.index(op) << 43 | bytes_

    def barrier(self, number: int | None) -> Steps:
        """Wait for all ranks."""
        sign = self._sign(number, "barrier", 0)
        yield self._begin()
        self._post(sign)
        yield EVERYONE, self.round
        self._check(sign, self.segment.others)

    def all_reduce(self, number: int | None, data: Tensor, op: str, root: int = EVERYONE) -> Steps:
        """Reduce in place; with a root only there."""
        cap, size = self.segment.layout.slot // data.element_size(), data.numel()
        bytes_ = size * data.element_size()
        sign = self._sign(number, "all_reduce" if root == EVERYONE else "reduce", bytes_)
        split = root == EVERYONE and self.size > 2 and bytes_ > WHOLE
        for start in range(0, max(size, 1), cap):
            piece = data[start : start + cap]
            yield self._begin()
            self._write(sign, piece)
            if root in (EVERYONE, self.rank):
                yield EVERYONE, self.round
                self._check(sign, self.segment.others)
                if split:
                    yield from self._reduce_share(piece, op)
                else:
                    parts = [self.slot(rank, data.dtype)[: piece.numel()] for rank in range(self.size)]
                    reduce_into(piece, parts, op)
            sign = None

    def _reduce_share(self, piece: Tensor, op: str) -> Steps:
        """Reduce this rank's share of a piece that lies in all slots, then collect the others' shares."""
        size, dtype = piece.numel(), piece.dtype
        bounds = [size * rank // self.size for rank in range(self.size + 1)]
        low, high = bounds[self.rank], bounds[self.rank + 1]
        parts = [self.slot(rank, dtype)[low:high] for rank in range(self.size)]
        yield self._begin()
        mine = self.slot(self.rank, dtype)[low:high]
        reduce_into(mine, parts, op)
        self._post(None)
        piece[low:high].copy_(mine)
        yield EVERYONE, self.round
        for rank in self.segment.others:
            part = slice(bounds[rank], bounds[rank + 1])
            piece[part].copy_(self.slot(rank, dtype)[part])

    def reduce_scatter(self, number: int | None, out: Tensor, data: Tensor, op: str) -> Steps:
        """Reduce `data` [ranks * K] and keep this rank's K elements in `out`."""
        size = out.numel()
        cap = self.segment.layout.slot // self.size // LINE * LINE // data.element_size()
        rows = data.view(self.size, size)
        sign = self._sign(number, "reduce_scatter", size * data.element_size())
        for start in range(0, max(size, 1), cap):
            piece = out[start : start + cap]
            n = piece.numel()
            yield self._begin()
            self.slot(self.rank, data.dtype)[: self.size * n].view(self.size, n).copy_(rows[:, start : start + n])
            self._post(sign)
            yield EVERYONE, self.round
            self._check(sign, self.segment.others)
            mine = slice(self.rank * n, self.rank * n + n)
            reduce_into(piece, [self.slot(rank, data.dtype)[mine] for rank in range(self.size)], op)
            sign = None

    def all_gather(self, number: int | None, outs: list[Tensor], data: Tensor, root: int = EVERYONE) -> Steps:
        """Collect the bytes of every rank into `outs` (uint8), with a root only there."""
        cap, size = self.segment.layout.slot, data.numel()
        sign = self._sign(number, "all_gather" if root == EVERYONE else "gather", size)
        for start in range(0, max(size, 1), cap):
            piece = slice(start, min(start + cap, size))
            n = piece.stop - start
            yield self._begin()
            self._write(sign, data[piece])
            if root in (EVERYONE, self.rank):
                outs[self.rank][piece].copy_(data[piece])
                yield EVERYONE, self.round
                self._check(sign, self.segment.others)
                for rank in self.segment.others:
                    outs[rank][piece].copy_(self.slot(rank, torch.uint8)[:n])
            sign = None

    def broadcast(self, number: int | None, data: Tensor, root: int) -> Steps:
        """Send the root's bytes to all; the root does not wait for the others to read the last piece."""
        cap, size = self.segment.layout.slot, data.numel()
        sign = self._sign(number, "broadcast", size)
        for start in range(0, max(size, 1), cap):
            piece = data[start : start + cap]
            if self.rank == root:
                yield self._begin()
                self._write(sign, piece)
            else:
                yield from self._follow(root, sign)
                piece.copy_(self.slot(root, torch.uint8)[: piece.numel()])
            sign = None

    def _follow(self, root: int, sign: int | None) -> Steps:
        """A round in which only the root writes."""
        self.round += 1
        self._post(None)
        yield root, self.round
        self._check(sign, [root])

    def scatter(self, number: int | None, out: Tensor, parts: list[Tensor], root: int) -> Steps:
        """Give each rank its part of the root's bytes; `parts` is empty elsewhere."""
        size = out.numel()
        cap = self.segment.layout.slot // self.size // LINE * LINE
        sign = self._sign(number, "scatter", size)
        for start in range(0, max(size, 1), cap):
            n = min(cap, size - start)
            if self.rank == root:
                yield self._begin()
                for rank in self.segment.others:
                    self.slot(root, torch.uint8)[rank * cap : rank * cap + n].copy_(parts[rank][start : start + n])
                out[start : start + n].copy_(parts[root][start : start + n])
                self._post(sign)
            else:
                yield from self._follow(root, sign)
                out[start : start + n].copy_(self.slot(root, torch.uint8)[self.rank * cap : self.rank * cap + n])
            sign = None

    def all_to_all(self, number: int | None, outs: list[Tensor], parts: list[Tensor]) -> Steps:
        """Give each rank its part of the bytes of every rank; sizes may differ by pair.

        The first words of a slot say how much there is for whom, so all ranks know how many rounds it takes.
        """
        sign = self._sign(number, "all_to_all", 0)
        sizes = [part.numel() for part in parts]
        head = -(-8 * self.size // LINE) * LINE
        cap, largest, start = (self.segment.layout.slot - head) // self.size // LINE * LINE, 1, 0
        outs[self.rank].copy_(parts[self.rank])
        while start < largest:
            yield self._begin()
            mine = self.slot(self.rank, torch.uint8)
            self.segment.put_words(self.segment.layout.slot_at(self.rank, self.round & 1), sizes)
            for rank in self.segment.others:
                if start < sizes[rank]:
                    piece = parts[rank][start : start + cap]
                    mine[head + rank * cap : head + rank * cap + piece.numel()].copy_(piece)
            self._post(sign)
            yield EVERYONE, self.round
            if start == 0:
                self._check(sign, self.segment.others)
                largest = self._largest(outs)
            place = head + self.rank * cap
            for rank in self.segment.others:
                if start < outs[rank].numel():
                    piece = outs[rank][start : start + cap]
                    piece.copy_(self.slot(rank, torch.uint8)[place : place + piece.numel()])
            start, sign = start + cap, None

    def _largest(self, outs: list[Tensor]) -> int:
        """The most bytes that one rank has for one other; see that what comes is what this rank expects."""
        largest = 0
        for rank in range(self.size):
            sizes = self.segment.get_words(self.segment.layout.slot_at(rank, self.round & 1), self.size)
            largest = max(largest, *sizes)
            if sizes[self.rank] != outs[rank].numel():
                world = self.segment.words[at.GLOBAL + rank]
                text = f"peer rank {world} gives {sizes[self.rank]} bytes, {outs[rank].numel()} are expected"
                raise PeerLost(f"shm: the split sizes of all_to_all do not fit: {text}")
        return largest
