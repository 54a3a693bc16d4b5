"""A microbatch as packed sequences: no padding, sequence boundaries beside the tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mmlab.data.sequence import IGNORE, TextSequence

__all__ = ["IGNORE", "PackedText", "TextSequence", "pack"]


@dataclass(frozen=True)
class PackedText:
    """The text of a microbatch: T tokens of several sequences, one after the other.

    `input_ids` int64 [T]; where an image stands, P (tokens per tile) placeholders in a row. `position_ids` int64 [T]
    restart at 0 in each sequence. `targets` int64 [T]: the token to predict at that position (already shifted),
    `IGNORE` where there is none. `seqlens`: tokens of each sequence, sums to T. `image_positions` int64 [N*P]: where
    image tokens go, in order of the images. `samples`: a name for each sequence.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    targets: torch.Tensor
    seqlens: tuple[int, ...]
    image_positions: torch.Tensor
    samples: tuple[str, ...]

    @property
    def tokens(self) -> int:
        """T, image tokens included."""
        return int(self.input_ids.shape[0])

    @property
    def image_tokens(self) -> int:
        """N * P."""
        return int(self.image_positions.shape[0])

    def to(self, device: torch.device | str) -> PackedText:
        """The same microbatch on a device."""
        return PackedText(
            self.input_ids.to(device),
            self.position_ids.to(device),
            self.targets.to(device),
            self.seqlens,
            self.image_positions.to(device),
            self.samples,
        )


def pack(sequences: Sequence[TextSequence], image_id: int) -> PackedText:
    """Put sequences one after the other. `image_id` is the placeholder's token. No sequence: T = 0."""
    ids = [token for sequence in sequences for token in sequence.ids]
    input_ids = torch.tensor(ids, dtype=torch.int64)
    positions = [position for sequence in sequences for position in range(len(sequence.ids))]
    return PackedText(
        input_ids=input_ids,
        position_ids=torch.tensor(positions, dtype=torch.int64),
        targets=torch.tensor([t for sequence in sequences for t in sequence.targets], dtype=torch.int64),
        seqlens=tuple(len(sequence.ids) for sequence in sequences),
        image_positions=(input_ids == image_id).nonzero().flatten(),
        samples=tuple(sequence.name for sequence in sequences),
    )
