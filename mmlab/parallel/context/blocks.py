"""Which blocks of the attention matrix a rank computes, from positions alone; made once for a microbatch.

A block is a set of queries of one sequence with a set of its keys. Whatever no query sees is cut away before a kernel
or a transfer sees it: with the zigzag split, half of each remote block. Blocks of equal shape and mask are one batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmlab.parallel.context.split import ContextGroup, Rows, Split

MASK_ROWS = 256
"""Most queries of a block that needs a mask (or the window, if that is longer): long runs are cut, so that most of what
they see needs none and what no query of a piece sees is not computed."""

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Side:
    """Tokens of one sequence on one rank: their rows among the rank's tokens, and their positions, both ascending."""

    rows: Rows
    positions: Rows

    def where(self, keep: Mask) -> Side:
        """The tokens that `keep` marks."""
        return Side(self.rows[keep], self.positions[keep])

    def between(self, first: int, last: int | None) -> Side:
        """The tokens at positions `first` to `last`, both included; None for no end."""
        start = int(np.searchsorted(self.positions, first))
        stop = len(self.rows) if last is None else int(np.searchsorted(self.positions, last, side="right"))
        return Side(self.rows[start:stop], self.positions[start:stop])

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class Block:
    """Queries and keys of one sequence of which (but for the mask) every query sees every key."""

    queries: Rows
    keys: Rows
    causal: bool = False
    mask: Mask | None = None
    """[queries, keys], True where a query sees a key; None where all do, or as `causal` says."""


def sees(queries: Rows, keys: Rows, window: int) -> Mask:
    """[queries, keys]: the causal mask, within `window` tokens (the token itself included); 0 means no limit."""
    back = queries[:, None] - keys[None, :]
    seen: Mask = back >= 0
    return seen & (back < window) if window else seen


def _pieces(side: Side, window: int, longest: int) -> Iterator[Side]:
    """Runs of at most `longest` tokens (0: any number), with a window also without a gap as wide as that."""
    cuts = np.flatnonzero(np.diff(side.positions) > window) + 1 if window else np.zeros(0, np.int64)
    for rows, positions in zip(np.split(side.rows, cuts), np.split(side.positions, cuts), strict=True):
        step = longest or max(1, len(rows))
        for start in range(0, len(rows), step):
            yield Side(rows[start : start + step], positions[start : start + step])


def _block(q: Side, k: Side, window: int) -> Block | None:
    """The part of queries x keys in which something is seen."""
    if not len(q) or not len(k):
        return None
    q = q.between(k.positions[0], k.positions[-1] + window - 1 if window else None)
    if not len(q):
        return None
    k = k.between(q.positions[0] - window + 1 if window else 0, q.positions[-1])
    if not len(k):
        return None
    near = not window or q.positions[-1] - k.positions[0] < window
    if near and q.positions[0] >= k.positions[-1]:
        return Block(q.rows, k.rows)
    if near and np.array_equal(q.positions, k.positions):
        return Block(q.rows, k.rows, causal=True)
    mask = sees(q.positions, k.positions, window)
    return Block(q.rows, k.rows, mask=mask) if mask.any() else None


def blocks(q: Side, k: Side, window: int) -> list[Block]:
    """All blocks of a sequence's queries with keys of it."""
    whole = _block(q, k, window)
    if whole is None or whole.mask is None:
        return [] if whole is None else [whole]
    found = []
    for queries in _pieces(q, window, max(window, MASK_ROWS)):
        if window:
            found += [_block(queries, keys, window) for keys in _pieces(k, window, 0)]
        else:  # keys up to the first query are seen by all of them
            first = int(queries.positions[0])
            found += [_block(queries, keys, 0) for keys in (k.between(0, first), k.between(first + 1, None))]
    return [block for block in found if block is not None]


@dataclass(frozen=True)
class Places:
    """Rows of a tensor [T, ...] that a batch reads and adds to, as [B, L]; a run of rows is read without a copy."""

    rows: Tensor
    """int64 [B, L]."""
    start: int | None
    """First row, where the rows are a run; None where they are not."""

    @staticmethod
    def of(rows: NDArray[np.int64]) -> Places:
        """Of [B, L] rows."""
        flat = rows.ravel()
        run = bool((np.diff(flat) == 1).all())
        return Places(torch.from_numpy(rows), int(flat[0]) if run else None)

    def to(self, device: torch.device | str) -> Places:
        """The same rows on a device."""
        return Places(self.rows.to(device), self.start)

    def take(self, x: Tensor) -> Tensor:
        """[T, H, ...] -> [B, H, L, ...]; a view of `x` where the rows are a run."""
        if self.start is None:
            part = x.index_select(0, self.rows.flatten())
        else:
            part = x.narrow(0, self.start, self.rows.numel())
        return part.unflatten(0, self.rows.shape).transpose(1, 2)

    def put(self, x: Tensor, part: Tensor) -> None:
        """Write back what `take` gave and was changed in place."""
        if self.start is None:
            x.index_copy_(0, self.rows.flatten(), part.transpose(1, 2).flatten(0, 1))

    def add(self, x: Tensor, part: Tensor) -> None:
        """Add [B, H, L, ...] to these rows of `x`; a row may stand in `rows` more than once."""
        if self.start is None:
            x.index_add_(0, self.rows.flatten(), part.transpose(1, 2).flatten(0, 1).to(x.dtype))
        else:
            self.take(x).add_(part)


@dataclass(frozen=True)
class Batch:
    """Blocks of equal shape, for one call of a kernel; no query is in two of them."""

    queries: Places
    """[B, Lq]."""
    keys: Places
    """[B, Lk], among the rows that this rank holds or has received."""
    causal: bool
    mask: Tensor | None
    """bool [Lq, Lk], the same for all blocks, or None."""

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on a device."""
        mask = None if self.mask is None else self.mask.to(device)
        return Batch(self.queries.to(device), self.keys.to(device), self.causal, mask)


def batches(found: Sequence[Block], tokens: int) -> list[Batch]:
    """Blocks of a rank with `tokens` tokens, put together where shape and mask are equal."""
    groups: dict[tuple[object, ...], list[Block]] = {}
    taken: dict[tuple[object, ...], Mask] = {}
    for block in found:
        mask = b"" if block.mask is None else block.mask.tobytes()
        shape = (len(block.queries), len(block.keys), block.causal, mask)
        again = 0
        while (*shape, again) in taken and taken[(*shape, again)][block.queries].any():
            again += 1
        key = (*shape, again)
        groups.setdefault(key, []).append(block)
        taken.setdefault(key, np.zeros(tokens, bool))[block.queries] = True
    return [
        Batch(
            Places.of(np.stack([block.queries for block in group])),
            Places.of(np.stack([block.keys for block in group])),
            group[0].causal,
            None if group[0].mask is None else torch.from_numpy(group[0].mask),
        )
        for group in groups.values()
    ]


@dataclass(frozen=True)
class Exchange:
    """One step of the ring: keys and values of `wanted` rows of this rank go to one rank, others come from another."""

    to: int
    """Index in the group of the rank that reads this rank's keys."""
    wanted: Tensor
    """int64 [n]: rows of this rank that `to` needs."""
    source: int
    """Index in the group of the rank whose keys this rank reads."""
    arriving: int
    """How many rows come from `source`."""
    batches: list[Batch]
    """What this rank computes with them; key rows count in what arrived."""
    skipped: int
    """Rows of this rank that `to` does not need: a ring that hands on whole blocks would send them."""


@dataclass(frozen=True)
class AttentionPlan:
    """What a rank computes and exchanges in each attention over a microbatch."""

    tokens: int
    """Tokens of this rank."""
    local: list[Batch]
    """Queries and keys of this rank."""
    partial: list[Batch]
    """Shared queries with keys that only this rank holds: to be merged over the ranks (scope "image")."""
    merged: Tensor
    """int64 [n]: rows of this rank's shared queries that some rank has a partial attention of; alike on all ranks."""
    exchanges: list[Exchange]

    def to(self, device: torch.device | str) -> AttentionPlan:
        """The same plan on a device."""
        exchanges = [
            Exchange(e.to, e.wanted.to(device), e.source, e.arriving, [b.to(device) for b in e.batches], e.skipped)
            for e in self.exchanges
        ]
        local, partial = [b.to(device) for b in self.local], [b.to(device) for b in self.partial]
        return AttentionPlan(self.tokens, local, partial, self.merged.to(device), exchanges)


class Planner:
    """Cuts a microbatch's tokens by sequence and asks for blocks between ranks."""

    def __init__(self, seqlens: Sequence[int], split: Split, window: int) -> None:
        self.split, self.window = split, window
        starts = np.concatenate([[0], np.cumsum(seqlens)]).astype(np.int64)
        self.sides = [self._sides(rows, starts) for rows in split.rows]

    @staticmethod
    def _sides(rows: Rows, starts: Rows) -> list[Side]:
        edges = np.searchsorted(rows, starts)
        return [
            Side(np.arange(low, high), rows[low:high] - start)
            for low, high, start in zip(edges[:-1], edges[1:], starts[:-1], strict=True)
        ]

    def _pick(self, rank: int, shared: bool) -> list[Side]:
        """The sequences of a rank, cut to the tokens that all ranks hold, or to those that only it holds."""
        is_shared = self.split.shared[self.split.rows[rank]]
        return [side.where(is_shared[side.rows] == shared) for side in self.sides[rank]]

    def _between(self, queries: list[Side], keys: list[Side]) -> list[Block]:
        return [block for q, k in zip(queries, keys, strict=True) for block in blocks(q, k, self.window)]

    def local(self, rank: int) -> list[Block]:
        """Blocks of a rank's queries with its own keys, but for those of `partial`."""
        if not self.split.shared.any():
            return self._between(self.sides[rank], self.sides[rank])
        text, own = self._pick(rank, True), self._pick(rank, False)
        return self._between(text, text) + self._between(own, text) + self._between(own, own)

    def partial(self, rank: int) -> list[Block]:
        """Blocks of shared queries with keys that only this rank holds."""
        return self._between(self._pick(rank, True), self._pick(rank, False))

    def remote(self, reader: int, owner: int) -> tuple[list[Block], Rows]:
        """Blocks of a rank's own queries with another's keys, and the rows of the owner's keys that they need.

        Key rows in the blocks count in the needed rows."""
        found = self._between(self._pick(reader, False), self._pick(owner, False))
        needed = np.unique(np.concatenate([block.keys for block in found])) if found else np.zeros(0, np.int64)
        moved = [Block(block.queries, np.searchsorted(needed, block.keys), block.causal, block.mask) for block in found]
        return moved, needed

    def merged(self, rank: int) -> Rows:
        """Rows of a rank's shared queries of which some rank has a partial attention."""
        tokens = [
            self.split.rows[other][block.queries]
            for other in range(len(self.split.rows))
            for block in self.partial(other)
        ]
        return np.searchsorted(self.split.rows[rank], np.unique(np.concatenate(tokens))) if tokens else np.zeros(0, int)


def attention_plan(seqlens: Sequence[int], split: Split, group: ContextGroup, window: int) -> AttentionPlan:
    """What rank `group.rank` does. Every rank makes the plans of the others' needs from the same facts."""
    planner, me, size = Planner(seqlens, split, window), group.rank, group.size
    count = [len(rows) for rows in split.rows]
    own = [int((~split.shared[rows]).sum()) for rows in split.rows]
    exchanges = []
    for step in range(1, size):
        to, source = (me + step) % size, (me - step) % size
        _, wanted = planner.remote(to, me)
        found, needed = planner.remote(me, source)
        ready = batches(found, count[me])
        skipped = own[me] - len(wanted)
        exchanges.append(Exchange(to, torch.from_numpy(wanted), source, len(needed), ready, skipped))
    return AttentionPlan(
        count[me],
        batches(planner.local(me), count[me]),
        batches(planner.partial(me), count[me]),
        torch.from_numpy(planner.merged(me).astype(np.int64)),
        exchanges,
    )
