"""What forward keeps for backward on each rank, in bytes: from shapes, and from the schedule how many microbatches of
it there are at once.

The counts of numbers a token are those of `mmlab.models`, held by tests/models/test_activations.py against what
autograd saves. Frozen modules keep less (their linear layers need no inputs) and so do samples shorter than
`data.seq_len`: the figures are upper ones.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from mmlab.plan.holders import beside_encoder
from mmlab.plan.layout import Layout, Place
from mmlab.plan.ops import Op
from mmlab.plan.schema import Plan
from mmlab.plan.sizes import block_parameters, most_tiles, projector_parameters, vision_block_parameters

WIDTHS = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a number in each format."""


def decoder_block(plan: Plan, tokens: float) -> float:
    """Bytes that one decoder block keeps of a microbatch of `tokens` on one tensor rank: inputs and results of both
    norms and what follows them, q, k, v and their mixture, four widths of the MLP, and in half precision its weights
    as computed with."""
    c, p = plan.model.language, plan.parallel
    kind = plan.precision.language
    size, wide = WIDTHS[kind], max(4, WIDTHS[kind])
    shared = p.tp if p.sp else 1  # what lies between tensor-parallel layers; with sp their inputs are gathered
    norms = (4 * size + (4 if size == 2 else 0)) * c.hidden / shared + 2 * size * c.hidden
    split = size * (2 * c.hidden + 2 * c.kv_heads * c.head_dim + 4 * c.mlp_width) / p.tp
    few = wide * (c.heads / p.tp + 2)
    return tokens * (norms + split + few) + _copy(kind, block_parameters(c, p.tp))


def encoder_block(plan: Plan, tokens: float) -> float:
    """Bytes that one block of the encoder keeps of `tokens` patches (of CLIP's, the class token too)."""
    c, kind = plan.model.vision, plan.precision.vision
    size = WIDTHS[kind]
    # fp16: norms and attention in fp32.
    numbers = 8 * c.hidden + (3 if c.family == "clip" else 2) * c.mlp_width + 4
    extra = 14 * c.hidden if kind == "fp16" else 0
    return tokens * (size * numbers + extra + max(4, size) * c.heads) + _copy(kind, vision_block_parameters(c))


def head(plan: Plan, tokens: float) -> float:
    """Bytes that the final norm, the output layer and the loss keep: the logits are by far the most."""
    c, kind = plan.model.language, plan.precision.language
    size = WIDTHS[kind]
    numbers = max(4, size) * c.vocab_size / plan.parallel.tp + (3 * size + (2 if size == 2 else 0)) * c.hidden + 20
    return tokens * numbers + _copy(kind, c.vocab_size * c.hidden // plan.parallel.tp)


def projector(plan: Plan, tokens: float) -> float:
    """Bytes that the projector keeps of `tokens` image tokens."""
    kind = plan.precision.projector
    width = plan.model.projector.hidden or plan.model.language.hidden
    return tokens * WIDTHS[kind] * (plan.model.vision.hidden + 2 * width) + _copy(kind, projector_parameters(plan))


def _copy(kind: str, parameters: int) -> float:
    """Weights in half precision that backward needs again: each microbatch keeps its own."""
    return WIDTHS[kind] * parameters if WIDTHS[kind] == 2 else 0.0


def microbatch_tokens(plan: Plan) -> float:
    """Tokens of a microbatch on one context-parallel rank, at most."""
    p, length = plan.parallel, plan.data.seq_len
    if p.cp_scope == "all":
        return plan.microbatch_size * length / p.cp
    image = min(length, plan.model.vision.tokens_per_tile * most_tiles(plan))
    return plan.microbatch_size * (length - image + image / p.cp)


def _chunk(plan: Plan, layout: Layout, stage: int) -> tuple[float, float]:
    """Bytes kept by one microbatch in one model chunk, and what is there besides while one of its blocks is computed
    again."""
    tokens, blocks = microbatch_tokens(plan), len(layout.stages.layers[stage])
    last = head(plan, tokens) if stage == layout.stages.count - 1 else 0.0
    full = decoder_block(plan, tokens)
    if not plan.train.activation_checkpointing:
        return blocks * full + last, 0.0
    shared = plan.parallel.tp if plan.parallel.sp else 1
    inputs = tokens * WIDTHS[plan.precision.language] * plan.model.language.hidden / shared
    return blocks * inputs + last, full if blocks else 0.0


def _encoded(plan: Plan, layout: Layout) -> tuple[float, float]:
    """The same of what an encoding rank takes at once."""
    p, c = plan.parallel, plan.model.vision
    images = plan.microbatch_size * min(p.encoder_batch, p.microbatches) * p.dp / max(1, len(layout.vision_ranks))
    images *= most_tiles(plan)
    patches = images * (c.tokens_per_tile + (c.family == "clip"))
    beside = projector(plan, images * c.tokens_per_tile) if beside_encoder(plan, "projector") else 0.0
    if plan.train.vision.frozen:
        return beside, 0.0
    full, size = encoder_block(plan, patches), WIDTHS[plan.precision.vision]
    beside += images * 3 * c.image_size**2 * size  # the pixels, cut into patches
    if not plan.train.activation_checkpointing:
        return c.layers * full + beside, 0.0
    return c.layers * patches * size * c.hidden + beside, full


def activation_bytes(plan: Plan, layout: Layout, ops: Sequence[Sequence[Op]]) -> list[float]:
    """Most bytes that each rank keeps at once, by the ops of a step (`Schedule.ops`)."""
    return [
        _peak(rank_ops, kept_bytes(plan, layout, place)) for place, rank_ops in zip(layout.places, ops, strict=True)
    ]


def kept_bytes(plan: Plan, layout: Layout, place: Place) -> Mapping[tuple[str, int], tuple[float, float]]:
    """What one forward keeps on a rank, and what is there besides while a block of it is computed again, by kind of op
    and model chunk."""
    sizes = {}
    if place.vision >= 0:
        sizes["encode", 0] = _encoded(plan, layout)
    for chunk, stage in enumerate(layout.stages.of(place.pp) if place.role == "language" else ()):
        kept, again = _chunk(plan, layout, stage)
        if layout.embeds(place) and chunk == 0 and not beside_encoder(plan, "projector"):
            kept += projector(plan, plan.microbatch_size * most_tiles(plan) * plan.model.vision.tokens_per_tile)
        sizes["forward", chunk] = kept, again
    return sizes


def _peak(ops: Iterable[Op], sizes: Mapping[tuple[str, int], tuple[float, float]]) -> float:
    """Forward adds, the last backward op of the same microbatch and chunk takes away; what has no backward keeps
    nothing."""
    listed = list(ops)
    ends = {(_forward(op), op.microbatch, op.chunk): index for index, op in enumerate(listed) if _forward(op)}
    now = most = 0.0
    for index, op in enumerate(listed):
        kept, again = sizes.get((op.kind, op.chunk), (0.0, 0.0))
        if (op.kind, op.microbatch, op.chunk) in ends:
            now += kept
            most = max(most, now)
        elif _forward(op):
            kept, again = sizes.get((_forward(op), op.chunk), (0.0, 0.0))
            most = max(most, now + again)
            if ends[_forward(op), op.microbatch, op.chunk] == index:
                now -= kept
    return most


def _forward(op: Op) -> str:
    """The kind of op whose activations a backward op uses; empty for others."""
    if op.kind == "encode_backward":
        return "encode"
    return "forward" if op.kind in ("backward", "backward_input", "backward_weight") else ""
