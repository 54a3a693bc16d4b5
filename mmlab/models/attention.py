"""Attention of a decoder layer over packed sequences: on one rank, or over ranks that share a microbatch's tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from mmlab.data.packed import IGNORE, PackedText
from mmlab.parallel.context.blocks import AttentionPlan, attention_plan
from mmlab.parallel.context.ring import ring_attention
from mmlab.parallel.context.split import ContextGroup, Pack, Split, split
from mmlab.parallel.context.ulysses import heads_here, tokens_here
from mmlab.plan.schema import ModelConfig

LONG = 1024
"""Tokens from which on a sequence of four windows or more is computed block by block: under a mask its cost grows with
the square of its length."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [T, H, Dh], k and v [T, G, Dh] (rotated; G divides H) to [T, H * Dh]: causal, within each sequence."""


@dataclass(frozen=True)
class PackedAttention:
    """Whole sequences on one rank, padded to the longest while the kernel runs."""

    count: int
    """B: sequences."""
    longest: int
    """L: tokens of the longest sequence."""
    slots: Tensor | None
    """int64 [T]: row of each token among the B x L padded ones; None if all sequences are equally long."""
    mask: Tensor | None
    """bool [L, L], True where a position sees another; None for the causal mask."""

    @staticmethod
    def of(seqlens: tuple[int, ...], window: int, device: torch.device) -> PackedAttention:
        """For sequences of these lengths; `window` in tokens, 0 for all tokens before."""
        count, longest = len(seqlens), max(seqlens, default=0)
        slots = mask = None
        if any(length != longest for length in seqlens):
            rows = [row * longest + i for row, length in enumerate(seqlens) for i in range(length)]
            slots = torch.tensor(rows, dtype=torch.int64, device=device)
        if 0 < window < longest:
            seen = torch.ones(longest, longest, dtype=torch.bool, device=device)
            mask = seen.tril_() & ~seen.tril(-window)
        return PackedAttention(count, longest, slots, mask)

    def to(self, device: torch.device | str) -> PackedAttention:
        """The same attention on a device."""
        slots, mask = (None if x is None else x.to(device) for x in (self.slots, self.mask))
        return PackedAttention(self.count, self.longest, slots, mask)

    def _pad(self, x: Tensor) -> Tensor:
        """[T, H, Dh] -> [B, H, L, Dh], zeros after the end of each sequence."""
        if self.slots is not None:
            x = x.new_zeros(self.count * self.longest, *x.shape[1:]).index_copy(0, self.slots, x)
        return x.view(self.count, self.longest, *x.shape[1:]).transpose(1, 2)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `Attend`. Padding stands after the end of a sequence, where causal attention lets no real token look."""
        mixed = F.scaled_dot_product_attention(
            self._pad(q), self._pad(k), self._pad(v), attn_mask=self.mask, is_causal=self.mask is None,
            enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        mixed = mixed.transpose(1, 2).reshape(self.count * self.longest, -1)
        return mixed if self.slots is None else mixed.index_select(0, self.slots)


@dataclass(frozen=True)
class RingAttention:
    """This rank's tokens of sequences that several ranks share."""

    plan: AttentionPlan
    group: ContextGroup

    def to(self, device: torch.device | str) -> RingAttention:
        """The same attention on a device."""
        return RingAttention(self.plan.to(device), self.group)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `Attend`, for this rank's tokens."""
        return ring_attention(q, k, v, self.plan, self.group).flatten(1)


def whole_attention(seqlens: tuple[int, ...], window: int, device: torch.device) -> PackedAttention | RingAttention:
    """Attention over whole sequences on one rank: padded, or with a window much shorter than they are block by block
    along the diagonal, which a mask [L, L] would hide but not spare."""
    longest = max(seqlens, default=0)
    if longest < LONG or not 0 < window <= longest // 4:
        return PackedAttention.of(seqlens, window, device)
    tokens, alone = sum(seqlens), ContextGroup()
    everything = Split((np.arange(tokens),), (np.ones(tokens, bool),), np.zeros(tokens, bool))
    return RingAttention(attention_plan(seqlens, everything, alone, window).to(device), alone)


@dataclass(frozen=True)
class UlyssesAttention:
    """All tokens and a share of the heads while attention is computed; `counts[c]` tokens of rank c."""

    whole: PackedAttention | RingAttention
    counts: tuple[int, ...]
    group: ContextGroup

    def to(self, device: torch.device | str) -> UlyssesAttention:
        """The same attention on a device."""
        return UlyssesAttention(self.whole.to(device), self.counts, self.group)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As `Attend`, for this rank's tokens."""
        return tokens_here(self.whole(*heads_here(q, k, v, self.counts, self.group)), self.counts, self.group)


@dataclass(frozen=True)
class SharedText(PackedText):
    """What one context-parallel rank holds of a microbatch: some of its tokens, in their order.

    Per token as in `PackedText`, but `seqlens` and `samples` are those of the whole microbatch, and targets of tokens
    that another rank counts are masked. `image_positions` [n]: where this rank's image tokens go among its tokens.
    """

    rows: Tensor = field(kw_only=True)
    """int64 [T]: this rank's tokens among those of the microbatch."""
    counted: Tensor = field(kw_only=True)
    """bool [T]: whether this rank counts the token; of a token on several ranks, one does."""
    image_rows: Tensor = field(kw_only=True)
    """int64 [n]: this rank's image tokens among the [N * P] of the microbatch."""
    attend: RingAttention | UlyssesAttention = field(kw_only=True)
    """Attention over the whole microbatch, for this rank's tokens."""

    def to(self, device: torch.device | str) -> SharedText:
        """The same tokens on a device."""
        names = ("input_ids", "position_ids", "targets", "image_positions", "rows", "counted", "image_rows")
        attend = self.attend.to(device)
        return replace(self, attend=attend, **{name: getattr(self, name).to(device) for name in names})


def share(text: PackedText, config: ModelConfig, cp: ContextGroup) -> PackedText:
    """This rank's part of a microbatch (on the CPU): the text itself where no group shares it."""
    if cp.size == 1:
        return text
    window = config.language.attention_window
    images = text.image_positions.numpy()
    cut = split(Pack(text.seqlens, images, config.vision.image_size // config.vision.patch_size), cp)
    mine, counted = cut.rows[cp.rank], torch.from_numpy(cut.counted[cp.rank])
    held = np.isin(images, mine)
    rows = torch.from_numpy(mine)
    attend: RingAttention | UlyssesAttention
    if cp.mode == "ulysses":
        counts = tuple(len(other) for other in cut.rows)
        attend = UlyssesAttention(whole_attention(text.seqlens, window, torch.device("cpu")), counts, cp)
    else:
        attend = RingAttention(attention_plan(text.seqlens, cut, cp, window), cp)
    return SharedText(
        text.input_ids[rows], text.position_ids[rows], text.targets[rows].masked_fill(~counted, IGNORE),
        text.seqlens, torch.from_numpy(np.searchsorted(mine, images[held])), text.samples,
        rows=rows, counted=counted, image_rows=torch.from_numpy(np.flatnonzero(held)), attend=attend,
    )  # fmt: skip


def own_ends(text: PackedText) -> tuple[Tensor, Tensor]:
    """(which sequences [K] end on this rank and count here, rows [K] of their last tokens among this rank's); int64."""
    ends = torch.tensor(text.seqlens, device=text.input_ids.device).cumsum(0) - 1
    if not isinstance(text, SharedText):
        return torch.arange(len(ends), device=ends.device), ends
    which, rows = ((ends[:, None] == text.rows[None, :]) & text.counted).nonzero(as_tuple=True)
    return which, rows
