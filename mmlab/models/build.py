"""The parts of the model that one rank holds, made from a plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mmlab.data.packed import PackedText
from mmlab.models.adapters import adapt
from mmlab.models.decoder import DecoderStage, StageParts
from mmlab.models.initial import parameter_maker
from mmlab.models.projector import Projector
from mmlab.models.sharding import parameter_specs, trains
from mmlab.models.vit import VisionEncoder
from mmlab.parallel.tensor import TensorGroup
from mmlab.plan.schema import MODULES, Plan

FORMATS = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The plan's names of number formats."""


@dataclass(frozen=True)
class Part:
    """Which parts of the model a rank holds."""

    vision: bool = False
    """The image encoder."""
    projector: bool = False
    """The projector."""
    chunks: tuple[range, ...] = ()
    """Decoder blocks by index, a range for each model chunk; none means no part of the decoder."""
    embed: bool = False
    """The embedding of token ids (with the first stage)."""
    head: bool = False
    """The final norm and output layer (with the last stage)."""


class PartModel(nn.Module):
    """What one rank holds: `vision`, `projector`, `language`, each None where absent; names are global."""

    def __init__(
        self, vision: VisionEncoder | None, projector: Projector | None, language: DecoderStage | None
    ) -> None:
        super().__init__()
        self.vision = vision
        self.projector = projector
        self.language = language

    def image_tokens(self, pixels: Tensor) -> Tensor:
        """Pixels [N, 3, S, S] -> image tokens [N * P, D], where the rank has encoder and projector."""
        assert self.vision is not None
        assert self.projector is not None
        return self.projector(self.vision(pixels)).flatten(0, 1)

    def forward(self, text: PackedText, pixels: Tensor | None = None) -> Tensor:
        """Sum of the losses of a microbatch, where the rank has the whole model; no pixels for text alone."""
        assert self.language is not None
        tokens = None if pixels is None or pixels.shape[0] == 0 else self.image_tokens(pixels)
        return self.language.loss(self.language(text, image_tokens=tokens), text.targets)


def build_part(
    plan: Plan, part: Part, tp: TensorGroup, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> PartModel:
    """Make the parts of the model that a rank holds, with the initial values of the plan's seed.

    Args:
        plan: model, precision, seed, activation checkpointing, adapters and what is frozen.
        part: what this rank holds.
        tp: tensor-parallel group of the rank's stage; `TensorGroup()` for one rank. Only the decoder is split.
        dtype: format of the master weights; float64 also computes in float64 whatever the plan's precision.
        device: where the weights live.

    Returns:
        The model; parameters that do not train need no gradient.
    """
    make = parameter_maker(parameter_specs(plan), plan.train.seed, tp, dtype, torch.device(device))
    formats = {name: dtype if dtype == torch.float64 else FORMATS[getattr(plan.precision, name)] for name in MODULES}
    recompute = plan.train.activation_checkpointing
    vision = projector = language = None
    if part.vision:
        vision = VisionEncoder(plan.model.vision, make, formats["vision"], recompute=recompute)
    if part.projector:
        projector = Projector(make, formats["projector"])
    if part.chunks:
        parts = StageParts(part.chunks, part.embed, part.head)
        language = DecoderStage(plan.model.language, parts, make, tp, formats["language"], recompute=recompute)
    model = PartModel(vision, projector, language)
    adapt(model, plan, make)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trains(plan, name))
    return model


def plain_model(plan: Plan, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> PartModel:
    """The whole model on one rank: what every layout must agree with."""
    chunks = (range(plan.model.language.layers),)
    everything = Part(vision=True, projector=True, chunks=chunks, embed=True, head=True)
    return build_part(plan, everything, TensorGroup(), dtype, device)
