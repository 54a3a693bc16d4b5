"""Tensors as the rounds want them: flat, contiguous, without autograd."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


def flat(tensor: Tensor) -> Tensor:
    """A tensor's elements in logical order, without autograd; its own memory where that is possible."""
    return tensor.detach().contiguous().view(-1)


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's elements in logical order, as uint8."""
    return flat(tensor).view(torch.uint8)


class Outputs:
    """Flat tensors to be filled for tensors of any strides; `finish` copies back where they are not the same memory."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors: list[Tensor] = []
        self.flat: list[Tensor] = []
        self._copies: list[tuple[Tensor, Tensor]] = []
        for tensor in tensors:
            if not tensor.is_cpu or tensor.layout is not torch.strided:
                raise ValueError(f"shm: a dense CPU tensor is needed, not {tensor.layout} on {tensor.device}")
            tensor = tensor.detach()
            self.tensors.append(tensor)
            if tensor.is_contiguous():
                self.flat.append(tensor.view(-1))
            else:
                self.flat.append(tensor.contiguous().view(-1))
                self._copies.append((tensor, self.flat[-1]))

    @property
    def bytes(self) -> list[Tensor]:
        """`flat` as uint8."""
        return [data.view(torch.uint8) for data in self.flat]

    @property
    def finish(self) -> Callable[[], None] | None:
        """What copies the results back; None where nothing is to be copied."""
        return self._finish if self._copies else None

    def _finish(self) -> None:
        for tensor, data in self._copies:
            tensor.copy_(data.view(tensor.shape))


def numbered(parts: Iterable[T], number: int) -> Iterator[tuple[T, int | None]]:
    """The parts of one call: the first carries its number, by which the ranks see that they make the same call."""
    for index, part in enumerate(parts):
        yield part, None if index else number


def total_size(tensors: Sequence[Tensor]) -> int:
    """Bytes of some tensors together."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
