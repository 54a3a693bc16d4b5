"""Which op of a step completes which gradients, so that reducing them can start inside backward."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mmlab.models.sharding import EMBED_TOKENS
from mmlab.parallel.buckets import Trained
from mmlab.plan.holders import beside_encoder
from mmlab.plan.layout import Layout, Place
from mmlab.plan.ops import Op

_BLOCK = re.compile(r"language\.model\.layers\.(\d+)\.")


def closing_ops(layout: Layout, place: Place, ops: Sequence[Op], trained: Sequence[Trained]) -> dict[Op, list[Trained]]:
    """The parameters whose gradients are complete after an op, for each such op of a rank.

    That is the last backward of a model chunk that a parameter belongs to (its weight half where backward is split); a
    tied table that embeds in one chunk and gives logits in another belongs to both. A parameter that no op touches is
    left out.
    """
    closing: dict[Op, list[Trained]] = {}
    for t in trained:
        if beside_encoder(layout.plan, t.module):
            wanted = [op for op in ops if op.kind == "encode_backward"]
        else:
            chunks = _chunks(layout, place, t)
            wanted = [op for op in ops if op.chunk in chunks and op.kind in ("backward", "backward_weight")]
        if wanted:
            closing.setdefault(wanted[-1], []).append(t)
    return closing


def _chunks(layout: Layout, place: Place, t: Trained) -> set[int]:
    """The model chunks of a rank that use a parameter of the decoder or of a projector beside it."""
    block = _BLOCK.match(t.name)
    if block is not None:
        return {chunk for chunk, layers in enumerate(layout.layers_of(place.pp)) if int(block[1]) in layers}
    held = layout.stages.of(place.pp)
    first, last = 0, layout.stages.count - 1
    if t.module == "projector":
        stages = {first}
    elif t.name == EMBED_TOKENS:
        stages = {first, last} if layout.plan.model.language.tied_embeddings else {first}
    else:
        stages = {last}
    return {chunk for chunk, stage in enumerate(held) if stage in stages}
