"""How large and how costly each rank's share of the model is, from shapes alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmlab.plan import lora
from mmlab.plan.holders import beside_encoder, holders, shared
from mmlab.plan.schema import LanguageConfig, Plan, VisionConfig

if TYPE_CHECKING:
    from mmlab.plan.layout import Layout, Place

_WEIGHT = 4
"""Bytes of an fp32 weight, and of a gradient and of each of AdamW's two moments where it trains."""


def vision_parameters(config: VisionConfig) -> int:
    """Parameters of the encoder: patch and position embedding, blocks, norms."""
    width, clip = config.hidden, config.family == "clip"
    patches = width * 3 * config.patch_size**2 + (0 if clip else width)
    positions = (config.tokens_per_tile + clip) * width + (width if clip else 0)
    return patches + positions + config.layers * vision_block_parameters(config) + 2 * width


def vision_block_parameters(config: VisionConfig) -> int:
    """Parameters of one block of the encoder."""
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
class Piece:
    """One rank's share of one module."""

    trained: int
    """Parameters that train."""
    frozen: int
    """Parameters that are only held."""
    sharding: str = "none"
    """What is shared out of it: none, zero1, zero2 or zero3."""
    ways: int = 1
    """Ranks that share it."""
    whole: int = 0
    """Parameters that zero2 and zero3 have gathered at once, at most."""
    waits: bool = False
    """Whether gradients stay whole until the last microbatch."""
    residuals: int = 0
    """Numbers that error feedback holds for each parameter that trains."""

    @property
    def weight_bytes(self) -> float:
        """fp32 weights between steps."""
        count = self.trained + self.frozen
        return _WEIGHT * (count / self.ways if self.sharding in ("zero2", "zero3") else count)

    @property
    def gradient_bytes(self) -> float:
        """fp32 gradients that the update reads."""
        return _WEIGHT * (self.trained / self.ways if self.sharding in ("zero2", "zero3") else self.trained)

    @property
    def optimizer_bytes(self) -> float:
        """AdamW's two moments, fp32."""
        return 2 * _WEIGHT * self.trained / self.ways

    @property
    def gathered_bytes(self) -> float:
        """Whole weights that a step holds beside the shared ones, and whole gradients that wait for its end."""
        waiting = self.trained if self.waits and self.sharding in ("zero2", "zero3") else 0
        return _WEIGHT * (self.whole + waiting)

    @property
    def residual_bytes(self) -> float:
        """What compression has left out, fp32: a number for each parameter that trains, whole on every rank; with fp16
        also that of before the step, which may be taken back. PowerSGD's factors, `rank` rows as long as a matrix's,
        are not counted."""
        return _WEIGHT * self.trained * self.residuals


@dataclass(frozen=True)
class Share:
    """One rank's share of the model: a piece of each module that it holds."""

    pieces: tuple[Piece, ...]

    @property
    def trained(self) -> int:
        """Parameters that train, as computed with (not as shared out)."""
        return sum(piece.trained for piece in self.pieces)

    @property
    def frozen(self) -> int:
        """Parameters that are only held."""
        return sum(piece.frozen for piece in self.pieces)

    @property
    def parameters(self) -> int:
        """Parameters that the rank computes with."""
        return self.trained + self.frozen

    @property
    def state_bytes(self) -> float:
        """Bytes of weights, gradients and optimizer state (activations and copies in lower precision not counted)."""
        return sum(piece.weight_bytes + piece.gradient_bytes + piece.optimizer_bytes for piece in self.pieces)

    @property
    def gathered_bytes(self) -> float:
        """What zero2 and zero3 hold whole besides while a step computes, at most."""
        return sum(piece.gathered_bytes for piece in self.pieces)

    @property
    def residual_bytes(self) -> float:
        """What error feedback holds besides."""
        return sum(piece.residual_bytes for piece in self.pieces)


def rank_share(plan: Plan, layout: Layout, place: Place) -> Share:
    """The part of the model that a rank holds."""
    pieces = []
    if place.vision >= 0:
        layers, block = plan.model.vision.layers, vision_block_parameters(plan.model.vision)
        adapters = layers * lora.parameters(plan, "vision")
        pieces.append(_piece(plan, "vision", vision_parameters(plan.model.vision), adapters, block))
    if place.role == "language":
        blocks, tp = sum(map(len, layout.layers_of(place.pp))), plan.parallel.tp
        adapters, block = blocks * lora.parameters(plan, "language", tp), block_parameters(plan.model.language, tp)
        pieces.append(_piece(plan, "language", _language_parameters(plan, layout, place), adapters, block, blocks))
    if place.vision >= 0 if plan.parallel.projector == "vision" else layout.embeds(place):
        pieces.append(_piece(plan, "projector", projector_parameters(plan), lora.parameters(plan, "projector"), 0))
    return Share(tuple(pieces))


def _piece(plan: Plan, module: str, base: int, adapters: int, block: int, blocks: int = 0) -> Piece:
    """A module's piece; `block` is the size of a unit that zero3 gathers, `blocks` how many of them a rank has."""
    frozen = getattr(plan.train, module).base_frozen
    trained, held = (adapters, base) if frozen else (base + adapters, 0)
    side = "vision" if beside_encoder(plan, module) else "language"
    feedback = getattr(plan.communication, side).keeps_residual and holders(plan, module) > 1
    residuals = (2 if plan.precision.scales_loss else 1) if feedback else 0  # compression.feedback.Kept: undoable
    if plan.parallel.engine != "native" or not shared(plan, module):
        return Piece(trained, held, residuals=residuals)
    sharding, total = plan.parallel.sharding, base + adapters
    whole = 0 if sharding == "zero1" else total
    if sharding == "zero3" and block and getattr(plan.sharding, module) == "layer":
        count = blocks or plan.model.vision.layers
        each = block + adapters // max(1, count)
        # A block and the next, which is on its way; what is in no block stays while the module runs.
        whole = total - count * each + min(2, count) * each
    waits = plan.parallel.microbatches > 1 and plan.sharding.reduce == "step"
    return Piece(trained, held, sharding, holders(plan, module), whole, waits, residuals)


def _language_parameters(plan: Plan, layout: Layout, place: Place) -> int:
    """Decoder parameters on one rank; a tied table is held where the first and where the last stage is."""
    config, p = plan.model.language, plan.parallel
    first, last = layout.embeds(place), layout.heads(place)
    tables = (first or last) if config.tied_embeddings else first + last
    table = config.vocab_size * config.hidden // p.tp
    blocks = sum(map(len, layout.layers_of(place.pp))) * block_parameters(config, p.tp)
    return blocks + tables * table + (config.hidden if last else 0)


def most_tiles(plan: Plan) -> int:
    """Tiles of a picture at most, thumbnail included: as many as `data.max_tiles` says and `data.seq_len` holds with
    two tokens of text; one at least."""
    d = plan.data
    room = (d.seq_len - 1) // plan.model.vision.tokens_per_tile
    return max(1, min(d.max_tiles + d.thumbnail, room)) if d.max_tiles > 1 and room > 1 + d.thumbnail else 1


def step_costs(plan: Plan, layout: Layout) -> dict[tuple[int, str, int], float]:
    """Floating-point operations of each compute op by (rank, kind, model chunk), for one image of as many tiles as can
    be (`most_tiles`) and `data.seq_len` tokens a sample.

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
    images, tokens = images * most_tiles(plan), config.tokens_per_tile
    encode = config.layers * (2 * tokens * vision_block_parameters(config) + 4 * tokens**2 * config.hidden)
    beside = plan.parallel.projector == "vision"
    return images * encode, images * 2 * tokens * projector_parameters(plan) if beside else 0.0


def _stage_flops(plan: Plan, layout: Layout, stage: int) -> float:
    """FLOPs of a microbatch's forward on one rank of a stage."""
    config, p, length = plan.model.language, plan.parallel, plan.data.seq_len
    # Keys that a token sees, mean over a sample; and a rank's tokens, where all ranks hold the text (of one image).
    window = min(config.attention_window or length, length)
    seen = window * (1 - window / (2 * length))
    image = plan.model.vision.tokens_per_tile * most_tiles(plan)
    here = length / p.cp if p.cp_scope == "all" else max(0, length - image) + image / p.cp
    block = 2 * here * block_parameters(config) + 4 * length / p.cp * seen * config.hidden
    flops = len(layout.stages.layers[stage]) * block
    if stage == layout.stages.count - 1:
        flops += 2 * length / p.cp * config.vocab_size * config.hidden
    return plan.microbatch_size * flops / p.tp
