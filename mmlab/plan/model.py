"""The sections of the plan that say what the model is."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mmlab.plan.section import Section


class VisionConfig(Section):
    """The image encoder, a ViT with SigLIP's or CLIP's names and shapes."""

    family: Literal["siglip", "clip"] = "siglip"
    """Which Hugging Face class the names and shapes follow: SigLIP (no class token, tanh GELU, biased patch
    embedding) or CLIP (class token dropped after the encoder, pre-layernorm, quick GELU)."""
    image_size: int = Field(64, ge=1)
    """Side of the square image (tile) that the encoder sees, in pixels."""
    patch_size: int = Field(16, ge=1)
    """Side of a square patch, in pixels. image_size must be a multiple of it."""
    hidden: int = Field(96, ge=1)
    """Width of the encoder, in elements."""
    layers: int = Field(2, ge=1)
    """Number of transformer blocks."""
    heads: int = Field(4, ge=1)
    """Number of attention heads; must divide hidden."""
    intermediate: int = Field(0, ge=0)
    """Width of the MLP, in elements; 0 means 4 x hidden."""
    norm_eps: float = Field(1e-6, gt=0)
    """Epsilon of the layer norms, dimensionless."""

    @property
    def mlp_width(self) -> int:
        """Width of the MLP in elements, with 0 resolved."""
        return self.intermediate or 4 * self.hidden

    @property
    def tokens_per_tile(self) -> int:
        """Image tokens that one image (tile) becomes: patches per side, squared."""
        return (self.image_size // self.patch_size) ** 2


class ProjectorConfig(Section):
    """The two-layer MLP from the encoder's width to the language model's (LLaVA-1.5)."""

    hidden: int = Field(0, ge=0)
    """Width between the two linear layers, in elements; 0 means the language model's width."""


class LanguageConfig(Section):
    """The decoder, with Llama's / Qwen2's names and shapes."""

    vocab_size: int = Field(1024, ge=1)
    """Rows of the embedding table, in tokens; at least the tokenizer's size, a multiple of tp."""
    hidden: int = Field(128, ge=1)
    """Width of the decoder, in elements."""
    layers: int = Field(4, ge=1)
    """Number of decoder blocks."""
    heads: int = Field(4, ge=1)
    """Number of query heads; must divide hidden."""
    kv_heads: int = Field(4, ge=1)
    """Number of key/value heads (grouped-query attention); must divide heads."""
    intermediate: int = Field(0, ge=0)
    """Width of the SwiGLU MLP, in elements; 0 means 8/3 x hidden rounded up to a multiple of 64."""
    attention_bias: bool = False
    """Bias on q, k and v projections (Qwen2 has it, Llama does not)."""
    tied_embeddings: bool = True
    """Whether the output layer shares the embedding table."""
    rope_theta: float = Field(10000.0, gt=0)
    """Base of the rotary position embedding, dimensionless."""
    norm_eps: float = Field(1e-6, gt=0)
    """Epsilon of the RMS norms, dimensionless."""
    max_positions: int = Field(2048, ge=1)
    """Longest sequence the model admits, in tokens, image tokens included."""
    attention_window: int = Field(0, ge=0)
    """Tokens that a token sees, itself and those just before it (Mistral's sliding window); 0 means all before it."""

    @property
    def mlp_width(self) -> int:
        """Width of the MLP in elements, with 0 resolved."""
        return self.intermediate or -(-8 * self.hidden // 3 // 64) * 64

    @property
    def head_dim(self) -> int:
        """Width of one head, in elements."""
        return self.hidden // self.heads
