"""Which tokens of a packed microbatch each context-parallel rank holds. A pure function, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from mmlab.parallel.traffic import Traffic

Rows = NDArray[np.int64]
"""Token indices into a pack, ascending."""


@dataclass(frozen=True)
class ContextGroup:
    """The ranks that share the tokens of one stage; a single rank has no group."""

    group: dist.ProcessGroup | None = None
    """Process group of the context-parallel ranks."""
    rank: int = 0
    """This rank's index in the group."""
    size: int = 1
    """Ranks in the group."""
    mode: str = "ring"
    """The plan's `parallel.cp_mode`."""
    scope: str = "all"
    """The plan's `parallel.cp_scope`."""
    traffic: Traffic | None = None
    """Where the bytes are counted."""

    def count(self, axis: str, like: Tensor, rows: int) -> None:
        """Count `rows` rows of a tensor like this as sent (or, `cp_skipped`, as not sent)."""
        if self.traffic is not None:
            self.traffic.add_rows(axis, like, rows)


@dataclass(frozen=True)
class Pack:
    """What a split depends on: the sequences of a pack and where image tokens stand in it."""

    seqlens: tuple[int, ...]
    """Tokens of each sequence."""
    image_positions: Rows
    """[N * P]: the tokens that are image tokens, P for each tile, row by row of its patch grid."""
    patches: int
    """Patches along a side of a tile (the square root of P)."""

    @property
    def tokens(self) -> int:
        """T."""
        return sum(self.seqlens)


@dataclass(frozen=True)
class Split:
    """The tokens of a pack on each rank."""

    rows: tuple[Rows, ...]
    """Tokens that rank c holds."""
    counted: tuple[NDArray[np.bool_], ...]
    """For each token of rank c, whether this rank counts it: a token on several ranks counts on one of them."""
    shared: NDArray[np.bool_]
    """[T]: tokens that every rank holds."""


def zigzag(seqlens: Sequence[int], size: int) -> tuple[Rows, ...]:
    """Each sequence cut into 2 x size pieces, rank c with pieces c and 2 size - 1 - c.

    An early and a late piece together see equally many tokens on every rank under a causal mask (the balance that
    Brandon et al. 2023 reach by stripes, with pieces long enough for a kernel). Sequences shorter than 2 x size leave
    some pieces empty.
    """
    found: list[list[Rows]] = [[] for _ in range(size)]
    start = 0
    for length in seqlens:
        edges = [start + length * i // (2 * size) for i in range(2 * size + 1)]
        for rank in range(size):
            for piece in (rank, 2 * size - 1 - rank):
                found[rank].append(np.arange(edges[piece], edges[piece + 1]))
        start += length
    return tuple(_join(pieces) for pieces in found)


def _join(pieces: list[Rows]) -> Rows:
    return np.concatenate(pieces).astype(np.int64) if pieces else np.zeros(0, np.int64)


def contiguous(tokens: int, size: int) -> tuple[Rows, ...]:
    """The pack cut into `size` runs whose lengths differ by at most one."""
    return tuple(np.arange(tokens * c // size, tokens * (c + 1) // size) for c in range(size))


def grid(size: int) -> tuple[int, int]:
    """(rows, columns) of the most nearly square grid of `size` blocks."""
    rows = max(r for r in range(1, size + 1) if size % r == 0 and r * r <= size)
    return rows, size // rows


def block_owner(patches: int, size: int) -> Rows:
    """[P]: which rank holds each patch of a tile, row by row: two-dimensional blocks, so that neighbours stay together
    and the border between ranks is short."""
    down, across = grid(size)
    y, x = np.divmod(np.arange(patches * patches), patches)
    return (y * down // patches) * across + x * across // patches


def split(pack: Pack, group: ContextGroup) -> Split:
    """Who holds what, by the group's mode and scope."""
    if group.scope == "image":
        return _split_images(pack, group.size)
    ulysses = group.mode == "ulysses"
    rows = contiguous(pack.tokens, group.size) if ulysses else zigzag(pack.seqlens, group.size)
    return Split(rows, tuple(np.ones(len(r), bool) for r in rows), np.zeros(pack.tokens, bool))


def _split_images(pack: Pack, size: int) -> Split:
    """Text on every rank and counted on one after the other; image tokens on the rank of their block."""
    owner = np.full(pack.tokens, -1)
    per_tile = pack.patches * pack.patches
    owner[pack.image_positions] = np.tile(block_owner(pack.patches, size), len(pack.image_positions) // per_tile)
    shared = owner < 0
    counts_on = owner.copy()
    counts_on[shared] = np.arange(int(shared.sum())) % size
    rows = tuple(np.flatnonzero(shared | (owner == rank)) for rank in range(size))
    return Split(rows, tuple(counts_on[r] == rank for rank, r in enumerate(rows)), shared)
