"""One sequence of tokens and targets, before packing. No torch."""

from __future__ import annotations

from dataclasses import dataclass

IGNORE = -100
"""Target where nothing is to be predicted (PyTorch's default `ignore_index`)."""


@dataclass(frozen=True)
class TextSequence:
    """`ids` (T) with each image already expanded to P placeholders, `targets` (T), shifted; `name` of the sample."""

    ids: tuple[int, ...]
    targets: tuple[int, ...]
    name: str = ""
