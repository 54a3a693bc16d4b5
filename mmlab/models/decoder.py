"""The decoder, with Llama's and Qwen2's names and shapes, or one pipeline stage of it, tensor-parallel or not.

RMSNorm, rotary positions (Su et al. 2021), grouped-query attention (Ainslie et al. 2023), SwiGLU (Shazeer 2020).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmlab.data.packed import PackedText
from mmlab.models.attention import Attend, SharedText, whole_attention
from mmlab.models.initial import MakeParameter
from mmlab.models.layers import Linear, RMSNorm, Table, run_block
from mmlab.models.sharding import EMBED_TOKENS, FINAL_NORM, LANGUAGE, LM_HEAD
from mmlab.parallel.tensor import (
    IGNORED,
    TensorGroup,
    at_least_float32,
    enter_columns,
    gather_from_group,
    leave_rows,
    local,
    one_summand,
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
)
from mmlab.plan.schema import LanguageConfig


@dataclass(frozen=True)
class Sequences:
    """What all blocks need to know about a microbatch: rotations, and how its tokens see each other."""

    cos: Tensor
    """[T, 1, Dh], at least float32."""
    sin: Tensor
    """[T, 1, Dh], at least float32; negative in the first half."""
    attend: Attend
    """Attention of these tokens."""

    @property
    def tokens(self) -> int:
        """T: tokens of this rank's tensor group."""
        return self.cos.shape[0]

    @staticmethod
    def of(text: PackedText, config: LanguageConfig, dtype: torch.dtype) -> Sequences:
        """Made once for a microbatch and stage, in the format of rotations that goes with computing in `dtype`."""
        device, wide, width = text.position_ids.device, at_least_float32(dtype), config.head_dim
        frequencies = 1.0 / (config.rope_theta ** (torch.arange(0, width, 2, dtype=wide, device=device) / width))
        angles = (text.position_ids.to(wide).unsqueeze(-1) * frequencies).unsqueeze(1)
        cos, sin = angles.cos(), angles.sin()
        attend: Attend = (
            text.attend
            if isinstance(text, SharedText)
            else whole_attention(text.seqlens, config.attention_window, device)
        )
        return Sequences(torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1), attend)

    def rotate(self, x: Tensor) -> Tensor:
        """Rotary positions: [T, H, Dh] -> [T, H, Dh]; element i is paired with i + Dh / 2, as Hugging Face does."""
        wide = x.to(self.cos.dtype)
        return (wide * self.cos + wide.roll(x.shape[-1] // 2, -1) * self.sin).to(x.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention within each packed sequence; heads are split over the tensor group."""

    def __init__(self, config: LanguageConfig, make: MakeParameter, name: str, tp: TensorGroup) -> None:
        super().__init__()
        self.head_dim, self.tp = config.head_dim, tp
        self.q_proj = Linear(make, f"{name}.q_proj", bias=config.attention_bias)
        self.k_proj = Linear(make, f"{name}.k_proj", bias=config.attention_bias)
        self.v_proj = Linear(make, f"{name}.v_proj", bias=config.attention_bias)
        self.o_proj = Linear(make, f"{name}.o_proj", bias=False)

    def forward(self, hidden: Tensor, sequences: Sequences) -> Tensor:
        """[S, D] -> [S, D], S = `tp.share(T)` tokens."""
        hidden = enter_columns(hidden, self.tp, sequences.tokens)
        q, k, v = (
            project(hidden).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = sequences.attend(sequences.rotate(q), sequences.rotate(k), v)
        return leave_rows(self.o_proj(mixed), self.tp)


class MLP(nn.Module):
    """SwiGLU; the inner width is split over the tensor group."""

    def __init__(self, make: MakeParameter, name: str, tp: TensorGroup) -> None:
        super().__init__()
        self.tp = tp
        self.gate_proj = Linear(make, f"{name}.gate_proj", bias=False)
        self.up_proj = Linear(make, f"{name}.up_proj", bias=False)
        self.down_proj = Linear(make, f"{name}.down_proj", bias=False)

    def forward(self, hidden: Tensor, tokens: int) -> Tensor:
        """[S, D] -> [S, D], S = `tp.share(tokens)`."""
        hidden = enter_columns(hidden, self.tp, tokens)
        return leave_rows(self.down_proj(F.silu(self.gate_proj(hidden)) * self.up_proj(hidden)), self.tp)


class Block(nn.Module):
    """Pre-norm decoder block: two all-reduces forward and two backward with tensor parallelism.

    With sequence parallelism each is an all-gather and a reduce-scatter, and norms and residuals hold a share of the
    tokens.
    """

    def __init__(self, config: LanguageConfig, make: MakeParameter, name: str, tp: TensorGroup) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(make, f"{name}.input_layernorm", config.norm_eps)
        self.self_attn = Attention(config, make, f"{name}.self_attn", tp)
        self.post_attention_layernorm = RMSNorm(make, f"{name}.post_attention_layernorm", config.norm_eps)
        self.mlp = MLP(make, f"{name}.mlp", tp)

    def forward(self, hidden: Tensor, sequences: Sequences) -> Tensor:
        """[S, D] -> [S, D]."""
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), sequences)
        return hidden + self.mlp(self.post_attention_layernorm(hidden), sequences.tokens)


@dataclass(frozen=True)
class StageParts:
    """Which parts of the decoder a rank holds."""

    chunks: tuple[range, ...]
    """Decoder blocks of each model chunk, by their index in the whole model."""
    embed: bool
    """The embedding of token ids, before the first chunk (with the first stage)."""
    head: bool
    """The final norm and the output layer (with the last stage)."""


class Embedding(Table):
    """The table of token ids; its rows (the vocabulary) are split over the tensor group."""

    def __init__(self, make: MakeParameter, name: str, tp: TensorGroup) -> None:
        super().__init__(make, name)
        self.tp = tp

    def forward(self, ids: Tensor) -> Tensor:
        """int64 [T] -> this rank's part of the rows [T, D] in the master format; their sum over the group is whole."""
        return vocab_parallel_embedding(ids, local(self.weight), self.tp)


class Backbone(nn.Module):
    """What a rank holds below the name that Hugging Face checkpoints give it (`model.`)."""

    def __init__(self, config: LanguageConfig, parts: StageParts, make: MakeParameter, tp: TensorGroup) -> None:
        super().__init__()
        table = parts.embed or (parts.head and config.tied_embeddings)
        self.embed_tokens = Embedding(make, EMBED_TOKENS.removesuffix(".weight"), tp) if table else None
        layers = chain.from_iterable(parts.chunks)
        self.layers = nn.ModuleDict({str(i): Block(config, make, f"{LANGUAGE}model.layers.{i}", tp) for i in layers})
        self.norm = RMSNorm(make, FINAL_NORM.removesuffix(".weight"), config.norm_eps) if parts.head else None


class DecoderStage(nn.Module):
    """One or more contiguous parts of the decoder (model chunks); parameters keep their names in the whole model.

    With tied embeddings a rank with the head but without the embedding holds a copy of the table, under the table's
    name; its gradient is to be summed with the first stage's.
    """

    def __init__(
        self,
        config: LanguageConfig,
        parts: StageParts,
        make: MakeParameter,
        tp: TensorGroup,
        dtype: torch.dtype,
        *,
        recompute: bool,
    ) -> None:
        super().__init__()
        self.config, self.parts, self.tp, self.dtype, self.recompute = config, parts, tp, dtype, recompute
        self.model = Backbone(config, parts, make, tp)
        untied = parts.head and not config.tied_embeddings
        self.lm_head = Table(make, LM_HEAD.removesuffix(".weight")) if untied else None
        self.always_grad = False
        """Whether backward passes all blocks also where nothing before them wants a gradient. Set where parameters are
        sharded: a rank with a microbatch of text alone must join the collectives of ranks whose images want one."""

    def hidden_shape(self, text: PackedText) -> tuple[int, int]:
        """[S, D] of what passes between stages for a microbatch."""
        return self.tp.share(text.tokens), self.config.hidden

    def forward(
        self,
        text: PackedText,
        hidden: Tensor | None = None,
        image_tokens: Tensor | None = None,
        finish: Callable[[Tensor], Tensor] | None = None,
        chunk: int = 0,
    ) -> Tensor:
        """Run the blocks of one chunk over a microbatch.

        Args:
            text: the packed sequences, or this rank's part of them (T tokens).
            hidden: [S, D] from the stage before, S = `tp.share(T)`; None for the chunk that embeds.
            image_tokens: [n, D] or [N, P, D] for `text.image_positions`; only on the stage that embeds. None without
                images in the microbatch.
            finish: `loss` or `logits` of the last stage with what else they need; sharded parameters are whole only
                while `forward` runs.
            chunk: which of the rank's model chunks.

        Returns:
            [S, D], before the final norm, in the computation's format; with `finish` what that returns.
        """
        if self.parts.embed and chunk == 0:
            hidden = self._embed(text, image_tokens)
        elif hidden is None:
            raise ValueError("a stage that does not embed needs the hidden states of the stage before")
        hidden = hidden.to(self.dtype)
        if self.always_grad and torch.is_grad_enabled() and not hidden.requires_grad:
            hidden.requires_grad_()
        sequences = Sequences.of(text, self.config, self.dtype)
        for layer in self.parts.chunks[chunk]:
            hidden = run_block(self.model.layers[str(layer)], self.recompute, hidden, sequences)
        return hidden if finish is None else finish(hidden)

    def chains(self) -> list[list[nn.Module]]:
        """What can be gathered piece by piece, in the order in which it runs: the blocks of each chunk, and before the
        first the table, unless the head shares it."""
        found: list[list[nn.Module]] = [[self.model.layers[str(i)] for i in chunk] for chunk in self.parts.chunks]
        if self.model.embed_tokens is not None and not self.config.tied_embeddings:
            found[0].insert(0, self.model.embed_tokens)
        return found

    def _embed(self, text: PackedText, image_tokens: Tensor | None) -> Tensor:
        """[S, D]: rows of the table, with image tokens where their placeholders stand."""
        assert self.model.embed_tokens is not None
        part = self.model.embed_tokens(text.input_ids).to(self.dtype)
        if image_tokens is None:
            return leave_rows(part, self.tp)
        rows = image_tokens.reshape(-1, part.shape[-1]).to(self.dtype)
        if self.tp.sequence:
            return leave_rows(part.index_copy(0, text.image_positions, one_summand(rows, self.tp)), self.tp)
        return leave_rows(part, self.tp).index_copy(0, text.image_positions, rows)

    def _split_logits(self, hidden: Tensor, rows: Tensor | None, tokens: int) -> Tensor:
        """[S, D] of T tokens -> [K, V / tp]: this rank's columns for the tokens at `rows` (None: all)."""
        table = self.lm_head or self.model.embed_tokens
        assert self.model.norm is not None
        assert table is not None
        if rows is not None and not self.tp.sequence:
            hidden = hidden.index_select(0, rows)
        hidden = enter_columns(self.model.norm(hidden), self.tp, tokens)
        if rows is not None and self.tp.sequence:
            hidden = hidden.index_select(0, rows)
        return table.project(hidden)

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Sum of the cross entropies of the positions with a target.

        Args:
            hidden: [S, D], what `forward` of the last stage returned.
            targets: int64 [T], -100 where there is nothing to predict.

        Returns:
            A scalar in at least float32; to be divided by the global count of targets.
        """
        tokens, rows = targets.shape[0], None
        if targets.device.type == "cpu":
            # Image tokens and prompts have no target: on CPU finding the rows that have one costs nothing, elsewhere
            # it would wait for the device.
            rows = (targets != IGNORED).nonzero().squeeze(-1)
            targets = targets.index_select(0, rows)
        return vocab_parallel_cross_entropy(self._split_logits(hidden, rows, tokens), targets, self.tp)

    def logits(self, hidden: Tensor, rows: Tensor | None = None, tokens: int = 0) -> Tensor:
        """[S, D] of the last stage -> [K, V] for the tokens at `rows` of `tokens` (default: all of them), whole on
        every rank of the tensor group."""
        return gather_from_group(self._split_logits(hidden, rows, tokens or hidden.shape[0]), self.tp)
