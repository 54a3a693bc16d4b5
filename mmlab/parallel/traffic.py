"""Bytes that a rank hands to communication, counted where it is handed over."""

from __future__ import annotations

from math import prod

from torch import Tensor

from mmlab.messages import AXES


class Traffic:
    """Payload bytes and calls of this rank by axis since they were last taken.

    Counted is what this rank sends point to point or gives to a collective as its input (for a reduce-scatter the whole
    tensor, for an all-gather its own shard); what the algorithm below makes of it is the backend's affair.
    """

    def __init__(self) -> None:
        self.bytes = dict.fromkeys(AXES, 0)
        self.calls = dict.fromkeys(AXES, 0)

    def add(self, axis: str, tensor: Tensor) -> None:
        """Count one call. KeyError for an axis that `mmlab.messages.AXES` does not name."""
        self.bytes[axis] += tensor.numel() * tensor.element_size()
        self.calls[axis] += 1

    def add_rows(self, axis: str, like: Tensor, rows: int) -> None:
        """Count `rows` rows of a tensor like this, in one call."""
        self.bytes[axis] += rows * prod(like.shape[1:]) * like.element_size()
        self.calls[axis] += 1

    def take(self) -> list[float]:
        """Bytes of each axis, in the order of AXES; counting starts anew."""
        taken = [float(self.bytes[axis]) for axis in AXES]
        self.bytes, self.calls = dict.fromkeys(AXES, 0), dict.fromkeys(AXES, 0)
        return taken
