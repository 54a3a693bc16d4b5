"""The image encoder: a Vision Transformer (Dosovitskiy et al. 2021) with SigLIP's or CLIP's names and shapes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmlab.models.initial import MakeParameter
from mmlab.models.layers import LayerNorm, Linear, Table, run_block, without_half
from mmlab.models.sharding import VISION
from mmlab.parallel.tensor import local
from mmlab.plan.schema import VisionConfig


class PatchEmbedding(nn.Module):
    """Pixels [N, 3, S, S] to patches [N, P, D].

    The weight has the shape of a convolution [D, 3, p, p], as Hugging Face stores it. Patches do not overlap, so
    cutting them out and one matrix product do the same, several times faster on CPU.
    """

    def __init__(self, make: MakeParameter, name: str, patch: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = make(f"{name}.weight")
        self.bias = make(f"{name}.bias") if bias else None
        self.patch = patch

    def forward(self, pixels: Tensor) -> Tensor:
        """Compute in the format of `pixels`; patches in row-major order."""
        images, channels, side, _ = pixels.shape
        grid = side // self.patch
        cut = pixels.reshape(images, channels, grid, self.patch, grid, self.patch).permute(0, 2, 4, 1, 3, 5)
        bias = None if self.bias is None else local(self.bias, pixels.dtype)
        weight = local(self.weight, pixels.dtype).flatten(1)
        return F.linear(cut.reshape(images, grid * grid, weight.shape[1]), weight, bias)


class Embeddings(nn.Module):
    """Patches plus learned positions; CLIP puts a class token in front."""

    def __init__(self, config: VisionConfig, make: MakeParameter, name: str) -> None:
        super().__init__()
        clip = config.family == "clip"
        self.class_embedding = make(f"{name}.class_embedding") if clip else None
        self.patch_embedding = PatchEmbedding(make, f"{name}.patch_embedding", config.patch_size, bias=not clip)
        self.position_embedding = Table(make, f"{name}.position_embedding")

    def forward(self, pixels: Tensor) -> Tensor:
        """[N, 3, S, S] -> [N, P, D] (SigLIP) or [N, 1 + P, D] (CLIP)."""
        hidden = self.patch_embedding(pixels)
        if self.class_embedding is not None:
            first = local(self.class_embedding, hidden.dtype).expand(hidden.shape[0], 1, -1)
            hidden = torch.cat([first, hidden], dim=1)
        return hidden + local(self.position_embedding.weight, hidden.dtype)


class Attention(nn.Module):
    """Multi-head self-attention in which every patch sees every patch; in float32 when the encoder runs in float16."""

    def __init__(self, config: VisionConfig, make: MakeParameter, name: str) -> None:
        super().__init__()
        self.heads = config.heads
        self.q_proj = Linear(make, f"{name}.q_proj")
        self.k_proj = Linear(make, f"{name}.k_proj")
        self.v_proj = Linear(make, f"{name}.v_proj")
        self.out_proj = Linear(make, f"{name}.out_proj")

    def forward(self, hidden: Tensor) -> Tensor:
        """[N, P, D] -> [N, P, D]."""
        q, k, v = (
            without_half(project(hidden)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = F.scaled_dot_product_attention(q, k, v).to(hidden.dtype)
        return self.out_proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linear layers; GELU by tanh (SigLIP) or x sigmoid(1.702 x) (CLIP) between them."""

    def __init__(self, config: VisionConfig, make: MakeParameter, name: str) -> None:
        super().__init__()
        self.quick = config.family == "clip"
        self.fc1 = Linear(make, f"{name}.fc1")
        self.fc2 = Linear(make, f"{name}.fc2")

    def forward(self, hidden: Tensor) -> Tensor:
        """[N, P, D] -> [N, P, D]."""
        hidden = self.fc1(hidden)
        hidden = hidden * torch.sigmoid(1.702 * hidden) if self.quick else F.gelu(hidden, approximate="tanh")
        return self.fc2(hidden)


class Block(nn.Module):
    """Pre-norm transformer block."""

    def __init__(self, config: VisionConfig, make: MakeParameter, name: str) -> None:
        super().__init__()
        self.layer_norm1 = LayerNorm(make, f"{name}.layer_norm1", config.norm_eps)
        self.self_attn = Attention(config, make, f"{name}.self_attn")
        self.layer_norm2 = LayerNorm(make, f"{name}.layer_norm2", config.norm_eps)
        self.mlp = MLP(config, make, f"{name}.mlp")

    def forward(self, hidden: Tensor) -> Tensor:
        """[N, P, D] -> [N, P, D]."""
        hidden = hidden + self.self_attn(self.layer_norm1(hidden))
        return hidden + self.mlp(self.layer_norm2(hidden))


class Blocks(nn.Module):
    """The transformer blocks, one after the other."""

    def __init__(self, config: VisionConfig, make: MakeParameter, name: str, *, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.layers = nn.ModuleList(Block(config, make, f"{name}.layers.{layer}") for layer in range(config.layers))

    def forward(self, hidden: Tensor) -> Tensor:
        """[N, P, D] -> [N, P, D]."""
        for block in self.layers:
            hidden = run_block(block, self.recompute, hidden)
        return hidden


class VisionTransformer(nn.Module):
    """The encoder below the name that Hugging Face checkpoints give it (`vision_model.`)."""

    def __init__(self, config: VisionConfig, make: MakeParameter, *, recompute: bool) -> None:
        super().__init__()
        clip = config.family == "clip"
        self.embeddings = Embeddings(config, make, VISION + "embeddings")
        self.pre_layrnorm = LayerNorm(make, VISION + "pre_layrnorm", config.norm_eps) if clip else None
        self.encoder = Blocks(config, make, VISION + "encoder", recompute=recompute)
        self.post_layernorm = None if clip else LayerNorm(make, VISION + "post_layernorm", config.norm_eps)

    def forward(self, pixels: Tensor) -> Tensor:
        """[N, 3, S, S] -> [N, P, D]."""
        hidden = self.embeddings(pixels)
        if self.pre_layrnorm is not None:
            hidden = self.pre_layrnorm(hidden)
        hidden = self.encoder(hidden)
        # Cloned, because FSDP2's hooks sit on what a module returns and warn of views.
        return hidden[:, 1:].clone() if self.post_layernorm is None else self.post_layernorm(hidden)


class VisionEncoder(nn.Module):
    """Images to features, one for each patch.

    SigLIP: `SiglipVisionModel`'s last hidden state (after `post_layernorm`; its pooling head is not part of the model).
    CLIP: `CLIPVisionModel`'s last hidden state without the class token. Its `post_layernorm` touches only the pooled
    class token and is left out. LLaVA reads the last layer but one of CLIP: set `model.vision.layers` to one less than
    the checkpoint has, the surplus layer is ignored on loading.
    """

    def __init__(self, config: VisionConfig, make: MakeParameter, dtype: torch.dtype, *, recompute: bool) -> None:
        super().__init__()
        self.dtype = dtype
        self.vision_model = VisionTransformer(config, make, recompute=recompute)

    def chains(self) -> list[list[nn.Module]]:
        """What can be gathered piece by piece, in the order in which it runs."""
        return [list(self.vision_model.encoder.layers)]

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels [N, 3, S, S], normalised, -> features [N, P, D] in the computation's format."""
        return self.vision_model(pixels.to(self.dtype))
