"""The projector: a two-layer MLP with GELU from image features to image tokens (LLaVA-1.5, Liu et al. 2023)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmlab.models.initial import MakeParameter
from mmlab.models.layers import Linear
from mmlab.models.sharding import PROJECTOR


class Projector(nn.Module):
    """Features [..., Dv] of the encoder to tokens [..., D] of the decoder, one for one."""

    def __init__(self, make: MakeParameter, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.linear_1 = Linear(make, PROJECTOR + "linear_1")
        self.linear_2 = Linear(make, PROJECTOR + "linear_2")

    def forward(self, features: Tensor) -> Tensor:
        """[N, P, Dv] -> [N, P, D] in the computation's format."""
        return self.linear_2(F.gelu(self.linear_1(features.to(self.dtype))))
