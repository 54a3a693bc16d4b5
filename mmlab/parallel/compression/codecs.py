"""Codecs: how a run of gradients becomes bytes and comes back. Pure functions of their input, without state."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Codec(Protocol):
    """A number format for gradients on the wire.

    `align`: a run of gradients is cut for several ranks at multiples of so many elements. `biased`: what coding loses
    must be sent later (error feedback) for training to converge.
    """

    align: int
    biased: bool

    def size(self, count: int) -> int:
        """Bytes of the payload of `count` elements."""

    def encode(self, x: Tensor, out: Tensor) -> None:
        """Write the payload of x [count], float32 or float64, into `out` [size(count)], uint8."""

    def decode(self, payload: Tensor, out: Tensor) -> None:
        """Write the elements of a payload [size(count)], uint8, into `out` [count], float32 or float64."""


class Plain:
    """The values as they are, in float32 or in float64."""

    align = 1
    biased = False

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
