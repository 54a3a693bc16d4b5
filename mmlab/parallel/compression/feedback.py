"""What a compressed reduction keeps from one step to the next."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Kept:
    """State of one bucket: its residual and, for PowerSGD, factors by parameter name.

    `residual` [numel of the bucket] is what compression has left out so far (error feedback: Seide et al. 2014,
    "1-bit SGD", section 3; Karimireddy et al. 2019), each rank's own, in units of the gradient without loss scale. None
    where nothing has been left out. With `undoable` the step's changes can be taken back: fp16 leaves the update of a
    step out when a gradient has overflowed, and what that step had sent was then never applied.
    """

    residual: Tensor | None = None
    factors: dict[str, Tensor] = field(default_factory=dict)
    undoable: bool = False
    _before: tuple[Tensor | None, dict[str, Tensor]] | None = None

    def begin(self) -> None:
        """A step begins: from here on changes can be taken back, where that is asked for."""
        if self.undoable:
            self._before = self.residual, dict(self.factors)

    def undo(self) -> None:
        """Take the changes of the step back."""
        if self._before is not None:
            self.residual, self.factors = self._before
            self._before = None

    def restore(self, residual: Tensor | None, factors: dict[str, Tensor]) -> None:
        """Stand where a checkpoint was made; nothing of before can be taken back."""
        self.residual, self.factors, self._before = residual, factors, None

    def correct(self, flat: Tensor, unit: float) -> None:
        """Add the residual to gradients [numel] that are `unit` times the real ones (the loss scale)."""
        if self.residual is not None:
            flat.add_(self.residual, alpha=unit)

    def corrected(self, flat: Tensor, unit: float) -> Tensor:
        """Gradients and residual together, in a tensor of their own: where the step's new residual is to be."""
        before, room = self.residual, self.room(flat)
        return room.copy_(flat) if before is None else torch.add(flat, before, alpha=unit, out=room)

    def room(self, like: Tensor) -> Tensor:
        """Where the step's new residual is to be written: in place of the old one, which has been added by now."""
        if self.residual is None or self._before is not None:
            self.residual = torch.empty_like(like)
        return self.residual

    def take(self, flat: Tensor, unit: float, feedback: bool, policy: str) -> Tensor | None:
        """Make of gradients [numel] what a step is to sum, in place. With `feedback` the residual is added, and where
        the new one is to be written is returned; without it, None, and the old one goes as `policy` says (`leave`)."""
        if not feedback:
            self.leave(flat, unit, policy)
            return None
        self.correct(flat, unit)
        return self.room(flat)

    def leave(self, flat: Tensor, unit: float, policy: str) -> None:
        """What becomes of a residual under a reduction that keeps none: `policy` flush adds it to the gradients of this
        step, drop forgets it, keep leaves it for a later compressor."""
        if policy == "flush":
            self.correct(flat, unit)
        if policy != "keep":
            self.residual = None

    @property
    def bytes(self) -> int:
        """Memory of all of it, with what a step could still take back."""
        tensors = [self.residual, *self.factors.values()]
        if self._before is not None:
            tensors += [self._before[0], *self._before[1].values()]
        held = {id(t): t for t in tensors if t is not None}
        return sum(t.numel() * t.element_size() for t in held.values())


@dataclass
class Packed:
    """Gradients of some parameters in one flat tensor [numel], by global name, with what their reduction keeps."""

    flat: Tensor
    shapes: dict[str, torch.Size]
    kept: Kept

    def views(self, flat: Tensor | None = None) -> Iterator[tuple[str, Tensor]]:
        """(name, view in the parameter's shape) of each gradient, or of another tensor [numel] laid out likewise."""
        flat, offset = self.flat if flat is None else flat, 0
        for name, shape in self.shapes.items():
            yield name, flat[offset : offset + shape.numel()].view(shape)
            offset += shape.numel()
