"""The whole model as one call, for an engine that wraps modules and watches their forwards (DeepSpeed)."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from mmlab.data.packed import PackedText
from mmlab.models.build import PartModel
from mmlab.models.layers import Table


class Whole(nn.Module):
    """The model of one rank; only the modules named in `inside` are registered, so only these does the engine see.

    With `accompany` a microbatch without images still runs the encoder, on one black tile of which no row is used:
    gradients are then zeros, not absent, and every rank calls its modules in the same order, backward too. The engine
    communicates as modules are called and gradients arrive, so ranks that differ there would wait for each other.
    """

    def __init__(self, part: PartModel, inside: Collection[str], image_size: int, *, accompany: bool) -> None:
        super().__init__()
        for name in inside:
            setattr(self, name, getattr(part, name))
        self._all = (part,)  # in a tuple: not registered
        self.image_size, self.accompany = image_size, accompany

    def tables(self) -> list[nn.Parameter]:
        """Parameters of tables, which have no forward of their own that an engine could watch."""
        return [module.weight for module in self.modules() if isinstance(module, Table)]

    def forward(
        self,
        text: PackedText | None,
        pixels: Tensor | None = None,
        tokens: Tensor | None = None,
        ends: Tensor | None = None,
    ) -> Tensor:
        """What a step or an evaluation needs, by what is given.

        Args:
            text: a microbatch; None to encode images alone.
            pixels: [N, 3, S, S], N may be 0.
            tokens: [N * P, D], image tokens made before, in place of pixels.
            ends: int64 [B], positions of which the logits are wanted.

        Returns:
            Image tokens [N * P, D] without text, logits [B, V] with `ends`, else the sum of the losses.
        """
        (part,) = self._all
        assert part.language is not None
        if pixels is not None and pixels.shape[0]:
            tokens = part.image_tokens(pixels)
        elif tokens is None and self.accompany:
            black = torch.zeros(1, 3, self.image_size, self.image_size, device=next(self.parameters()).device)
            tokens = part.image_tokens(black)[:0]
        if text is None:
            assert tokens is not None
            return tokens
        hidden = part.language(text, image_tokens=tokens)
        if ends is not None:
            logits: Tensor = part.language.logits(hidden[ends])
            return logits
        loss: Tensor = part.language.loss(hidden, text.targets)
        return loss
