"""How large and how costly each rank's share of the model is, from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmlab.plan import lora
from mmlab.plan.schema import LanguageConfig, Plan, VisionConfig

if TYPE_CHECKING:
    from mmlab.plan.layout import Layout, Place

_BYTES_TRAINED, _BYTES_FROZEN = 16, 4
"""Bytes a parameter: fp32 weight, gradient and AdamW's two moments when trained, fp32 weight alone when frozen."""


def vision_parameters(config: VisionConfig) -> int:
    """Parameters of the encoder: patch and position embedding, blocks, norms."""
    width, clip = config.hidden, config.family == "clip"
    patches = width * 3 * config.patch_size**2 + (0 if clip else width)
    positions = (config.tokens_per_tile + clip) * width + (width if clip else 0)
    return patches + positions + config.layers * _vision_block(config) + 2 * width


def _vision_block(config: VisionConfig) -> int:
    width, mlp = config.hidden, config.mlp_width
    return 4 * (width * width + width) + 2 * width * mlp + mlp + width + 4 * width


def projector_parameters(plan: Plan) -> int:
    """Parameters of the two-layer projector."""
    out = plan.model.language.hidden
    width = plan.model.projector.hidden or out
    return (plan.model.vision.hidden + 1) * width + (width + 1) * out


def block_parameters(config: LanguageConfig, tp: int = 1) -> int:
    """Parameters of one decoder block on one of `tp` tensor ranks (norms are whole on each)."""
    width, kv = config.hidden, config.kv_heads * config.head_dim
    matrices = 2 * width * width + 2 * width * kv + 3 * width * config.mlp_width
    biases = (width + 2 * kv) if config.attention_bias else 0
    return (matrices + biases) // tp + 2 * width


def language_parameters(config: LanguageConfig) -> int:
    """Parameters of the whole decoder; a tied table counts once."""
    tables = 1 if config.tied_embeddings else 2
    return config.layers * block_parameters(config) + tables * config.vocab_size * config.hidden + config.hidden


@dataclass(frozen=True)
class Share:
    """One rank's share: parameters it trains and parameters it only holds."""

    trained: int
    frozen: int

    @property
    def parameters(self) -> int:
        """Parameters on the rank."""
        return self.trained + self.frozen

    @property
    def state_bytes(self) -> int:
        """Bytes of weights, gradients and optimizer state (activations and copies in lower precision not counted)."""
        return _BYTES_TRAINED * self.trained + _BYTES_FROZEN * self.frozen


def rank_share(plan: Plan, layout: Layout, place: Place) -> Share:
    """Parameters of the part of the model that a rank holds."""
    train, beside = plan.train, plan.parallel.projector == "vision"
    pieces: list[tuple[int, bool]] = []
    adapters = 0
    if place.vision >= 0:
        pieces.append((vision_parameters(plan.model.vision), train.vision.base_frozen))
        adapters += plan.model.vision.layers * lora.parameters(plan, "vision")
    if place.role == "language":
        pieces.append((_language_parameters(plan, layout, place), train.language.base_frozen))
        blocks = sum(map(len, layout.layers_of(place.pp)))
        adapters += blocks * lora.parameters(plan, "language", plan.parallel.tp)
    if place.vision >= 0 if beside else layout.embeds(place):
        pieces.append((projector_parameters(plan), train.projector.base_frozen))
        adapters += lora.parameters(plan, "projector")
    trained = sum(n for n, frozen in pieces if not frozen) + adapters
    return Share(trained, sum(n for n, frozen in pieces if frozen))


def _language_parameters(plan: Plan, layout: Layout, place: Place) -> int:
    """Decoder parameters on one rank; a tied table is held where the first and where the last stage is."""
    config, p = plan.model.language, plan.parallel
    first, last = layout.embeds(place), layout.heads(place)
    tables = (first or last) if config.tied_embeddings else first + last
    table = config.vocab_size * config.hidden // p.tp
    blocks = sum(map(len, layout.layers_of(place.pp))) * block_parameters(config, p.tp)
    return blocks + tables * table + (config.hidden if last else 0)


def step_costs(plan: Plan, layout: Layout) -> dict[tuple[int, str, int], float]:
    """Floating-point operations of each compute op by (rank, kind, model chunk), for one image and `data.seq_len`
    tokens a sample.

    A backward costs a forward for the inputs and another for the weights where they train, and one more with
    activation checkpointing (Narayanan et al. 2021, section 5.1), which then belongs to the half for the inputs.
    Adapters (a few percent) are not counted.
    """
    costs: dict[tuple[int, str, int], float] = {}
    p, again = plan.parallel, 1 if plan.train.activation_checkpointing else 0
    encode, project = _encoder_flops(plan, layout)
    for place in layout.places:
        if place.vision >= 0:
            train = plan.train
            vision = 0 if train.vision.frozen else (1 if train.vision.base_frozen else 2) + again
            projector = 2 if not train.projector.base_frozen else (1 if vision or not train.projector.frozen else 0)
            costs[place.rank, "encode", 0] = encode + project
            if p.encoder_ahead:
                costs[place.rank, "encode", 0] = project
                costs[place.rank, "encode_ahead", 0] = encode * -(-p.microbatches // p.encoder_batch)
            costs[place.rank, "encode_backward", 0] = vision * encode + projector * project
        for chunk, stage in enumerate(layout.stages.of(place.pp) if place.role == "language" else ()):
            forward = _stage_flops(plan, layout, stage)
            weights = 0 if plan.train.language.base_frozen else forward
            costs[place.rank, "forward", chunk] = forward
            costs[place.rank, "backward", chunk] = (1 + again) * forward + weights
            costs[place.rank, "backward_input", chunk] = (1 + again) * forward
            costs[place.rank, "backward_weight", chunk] = weights
    return costs


def _encoder_flops(plan: Plan, layout: Layout) -> tuple[float, float]:
    """FLOPs of what one encoding rank takes at once, an equal share of the images of `parallel.encoder_batch`
    microbatches of all replicas: (encoder, projector where it is beside it)."""
    p, config = plan.parallel, plan.model.vision
    images = plan.microbatch_size * min(p.encoder_batch, p.microbatches) * p.dp / max(1, len(layout.vision_ranks))
    tokens = config.tokens_per_tile
    encode = config.layers * (2 * tokens * _vision_block(config) + 4 * tokens**2 * config.hidden)
    beside = plan.parallel.projector == "vision"
    return images * encode, images * 2 * tokens * projector_parameters(plan) if beside else 0.0


def _stage_flops(plan: Plan, layout: Layout, stage: int) -> float:
    """FLOPs of a microbatch's forward on one rank of a stage."""
    config, p, length = plan.model.language, plan.parallel, plan.data.seq_len
    # Keys that a token sees, mean over a sample; and a rank's tokens, where all ranks hold the text (of one image).
    window = min(config.attention_window or length, length)
    seen = window * (1 - window / (2 * length))
    image = plan.model.vision.tokens_per_tile
    here = length / p.cp if p.cp_scope == "all" else max(0, length - image) + image / p.cp
    block = 2 * here * block_parameters(config) + 4 * length / p.cp * seen * config.hidden
    flops = len(layout.stages.layers[stage]) * block
    if stage == layout.stages.count - 1:
        flops += 2 * length / p.cp * config.vocab_size * config.hidden
    return plan.microbatch_size * flops / p.tp
