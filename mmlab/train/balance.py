"""Times of the layers as this machine computes them, and the split of the decoder that follows (balance = "measured").

The split must be the same on all ranks and in every later generation of a run, so one rank measures, the others are
told, and the result goes into the run's plan as `layers_per_stage`. Layouts stay functions of the plan alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from mmlab.data.pipeline import DataSource
from mmlab.models.build import Part, PartModel, build_part
from mmlab.models.decoder import Sequences
from mmlab.models.layers import run_block
from mmlab.parallel.mesh import Mesh
from mmlab.parallel.tensor import TensorGroup
from mmlab.plan import Plan
from mmlab.plan.balance import LayerTimes, report
from mmlab.plan.layout import Layout
from mmlab.train.control import Channel
from mmlab.train.precision import master_dtype

WARM_UPS, REPEATS = 2, 5


def settle(plan: Plan, mesh: Mesh) -> tuple[Plan, dict[str, Any] | None]:
    """The plan with its split decided, and what was measured (None where nothing had to be); all ranks together.

    The mesh's layout becomes that of the plan returned. Groups do not depend on the split.
    """
    if not plan.parallel.undecided:
        return plan, None
    channel = Channel(mesh)
    found = channel.share(report(plan, measure(plan, mesh.device)) if channel.rank == 0 else None)
    plan = plan.with_({"parallel.layers_per_stage": found["layers_per_stage"]})
    mesh.layout = Layout(plan)
    return plan, found


def measure_plan(rank: int, world: int, host: str, port: int, plan_text: str) -> dict[str, Any]:
    """`mmlab balance`: measure and choose, on one process."""
    plan = Plan.loads(plan_text)
    return report(plan, measure(plan, torch.device("cpu")))


def measure(plan: Plan, device: torch.device) -> LayerTimes:
    """Times of the layers with the first microbatch of the plan's own data.

    Needs the memory of one block, the tables, and the encoder where it is merged with the first stage. Tensor and
    context parallelism divide all of the decoder alike, so they do not change which split is best.
    """
    p = plan.parallel
    merged, projects = p.vision == "first_stage", p.projector == "first_stage"
    part = Part(vision=merged, projector=merged or projects, chunks=(range(1),), embed=True, head=True)
    model = build_part(plan, part, TensorGroup(), master_dtype(plan), device)
    source = DataSource(plan)
    try:
        manifest, _ = source.manifest(1, source.start())
        positions = manifest.microbatch(0, 0)
        text = source.text(manifest, positions).to(device)
        tiles = sum(manifest.samples[position].tiles for position in positions)
    finally:
        source.close()
    language = model.language
    assert language is not None
    hidden = torch.randn(text.tokens, plan.model.language.hidden, dtype=language.dtype, device=device).requires_grad_()
    sequences = Sequences.of(text, plan.model.language, language.dtype)
    block, table = language.model.layers["0"], language.model.embed_tokens
    assert table is not None
    share = -(-tiles // (p.tp * p.cp))
    return LayerTimes(
        block=_seconds(lambda: run_block(block, language.recompute, hidden, sequences), device),
        embedding=_seconds(lambda: table(text.input_ids), device),
        head=_seconds(lambda: language.loss(hidden, text.targets), device),
        encoder=_seconds(lambda: _encode(model, plan, share, device), device) if merged and tiles else 0.0,
        projector=_seconds(lambda: _project(model, plan, tiles, device), device) if projects and tiles else 0.0,
    )


def _encode(model: PartModel, plan: Plan, tiles: int, device: torch.device) -> Tensor:
    assert model.vision is not None
    size = plan.model.vision.image_size
    features: Tensor = model.vision(torch.zeros(tiles, 3, size, size, device=device))
    if plan.parallel.projector == "first_stage":
        return features
    assert model.projector is not None
    tokens: Tensor = model.projector(features)
    return tokens


def _project(model: PartModel, plan: Plan, tiles: int, device: torch.device) -> Tensor:
    assert model.projector is not None
    vision = plan.model.vision
    shape = (tiles, vision.tokens_per_tile, vision.hidden)
    tokens: Tensor = model.projector(torch.zeros(shape, device=device).requires_grad_())
    return tokens


def _seconds(forward: Callable[[], Tensor], device: torch.device) -> float:
    """Median seconds of a forward with its backward, where anything wants a gradient."""

    def once() -> float:
        began = time.perf_counter()
        output = forward()
        if output.requires_grad:
            output.backward(torch.ones_like(output))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    for _ in range(WARM_UPS):
        once()
    return median(once() for _ in range(REPEATS))
