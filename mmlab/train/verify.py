"""Sharded equals plain: the plan against one process, tensor by tensor (design, "How correctness is shown").

These functions run in rank processes; `mmlab.cluster.verify` starts them.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from mmlab.data.pipeline import DataSource
from mmlab.parallel.mesh import build_mesh, close_mesh
from mmlab.parallel.watch import Watch
from mmlab.plan import Plan
from mmlab.train.balance import settle
from mmlab.train.build import build
from mmlab.train.feed import Feed
from mmlab.train.plain import StepRecord, run_plain
from mmlab.train.runner import make_runner
from mmlab.train.step import Inspected, Ride

TINY = 1e-8
"""A tensor under this share of the global norm is compared with the global norm: its true value may be zero."""


@dataclass
class Shards:
    """One rank's tensors of every step. `cuts[name]`: where its part of a tensor begins in each dim,
    None for all of it."""

    losses: list[float] = field(default_factory=list)
    cuts: dict[str, tuple[int, ...] | None] = field(default_factory=dict)
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    params: list[dict[str, Tensor]] = field(default_factory=list)


def _cut(param: Tensor) -> tuple[int, ...] | None:
    if not isinstance(param, DTensor):
        return None
    _, offsets = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return tuple(offsets)


def run_ranks(rank: int, world: int, host: str, port: int, plan_text: str, steps: int, folder: str) -> None:
    """One rank of the plan for `steps` steps; leaves `rank-N.pt` in the folder."""
    plan = Plan.loads(plan_text)
    store = dist.TCPStore(host, port, is_master=False) if world > 1 else None
    mesh = build_mesh(plan, plan.layout(), rank, store, torch.device("cpu"))
    plan, _ = settle(plan, mesh)
    built = build(plan, mesh)
    feed = Feed(plan, mesh, DataSource(plan))
    runner = make_runner(plan, mesh, built, Watch(telemetry=False))
    shards = Shards(cuts={name: _cut(param) for name, param in built.part.named_parameters()})

    def inspect(live: Inspected) -> None:
        shards.grads.append({name: grad.clone() for name, grad in live.gradients().items()})

    try:
        feed.reset(feed.cursors, 0)
        for step in range(1, steps + 1):
            batch = feed.batch()
            ride = Ride(next_bad=functools.cache(feed.next_bad), next_size=plan.data.global_batch)
            while (result := runner.train(plan, step, batch, ride, inspect)).overflow:
                shards.grads.pop()  # fp16: the same batch with a smaller loss scale
            feed.agree(result.next_bad)
            shards.losses.append(result.loss)
            shards.params.append({name: value.clone() for name, value in runner.weights().items()})
        torch.save(vars(shards), Path(folder) / f"rank-{rank}.pt")
    finally:
        runner.close()
        feed.close()
        close_mesh(mesh)


def run_reference(rank: int, world: int, host: str, port: int, plan_text: str, steps: int, folder: str) -> None:
    """The plain run; leaves `plain.pt` in the folder."""
    torch.save([vars(record) for record in run_plain(Plan.loads(plan_text), steps)], Path(folder) / "plain.pt")


@dataclass
class Worst:
    """The largest relative differences found, and where."""

    loss: float = 0.0
    grad: float = 0.0
    param: float = 0.0
    grad_at: str = ""
    param_at: str = ""


def _norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(t.double().square().sum()) for t in tensors))


def _largest(found: list[Shards], plain: dict[str, Tensor], kind: str, step: int) -> tuple[float, str]:
    """Largest ||a - b|| / ||b|| over tensors; NaN anywhere counts as infinite. Of several ranks with the same part of a
    tensor the one that is furthest off counts; a tensor of which a part is on no rank is infinitely wrong."""
    floor = _norm(list(plain.values()))
    squares: dict[str, dict[tuple[int, ...], float]] = defaultdict(lambda: defaultdict(float))
    sizes: dict[str, dict[tuple[int, ...], int]] = defaultdict(dict)
    for shards in found:
        for name, value in getattr(shards, kind)[step].items():
            want = plain[name]
            offsets = shards.cuts[name] or (0,) * want.dim()
            for dim, offset in enumerate(offsets):
                want = want.narrow(dim, offset if value.numel() else 0, value.shape[dim])
            square = float((value.double() - want.double()).square().sum())
            square = math.inf if math.isnan(square) else square
            squares[name][offsets] = max(squares[name][offsets], square)
            sizes[name][offsets] = max(sizes[name].get(offsets, 0), value.numel())
    lost = [name for name, tensor in plain.items() if sum(sizes[name].values()) != tensor.numel()]
    if lost:
        return math.inf, f"{min(lost)} (not whole on the ranks together)"
    worst, where = 0.0, ""
    for name, parts in squares.items():
        own = _norm([plain[name]])
        scale = own if own > TINY * floor else floor
        total = sum(parts.values())
        error = math.sqrt(total) / scale if scale > 0 else (0.0 if total == 0 else math.inf)
        if error > worst:
            worst, where = error, name
    return worst, where


def compare(rank: int, world: int, host: str, port: int, ranks_folder: str, plain_folder: str) -> dict[str, Any]:
    """Compare what `run_ranks` left in one folder with what `run_reference` left in another (or the same)."""
    found = [Shards(**torch.load(path, weights_only=True)) for path in sorted(Path(ranks_folder).glob("rank-*.pt"))]
    plain = [StepRecord(**value) for value in torch.load(Path(plain_folder) / "plain.pt", weights_only=True)]
    worst = Worst()
    for step in range(len(found[0].losses)):
        record = plain[step]
        for shards in found:
            difference = abs(shards.losses[step] - record.loss) / abs(record.loss)
            worst.loss = max(worst.loss, math.inf if math.isnan(difference) else difference)
        grad, grad_at = _largest(found, record.grads, "grads", step)
        param, param_at = _largest(found, record.params, "params", step)
        if grad > worst.grad:
            worst.grad, worst.grad_at = grad, f"{grad_at} at step {step + 1}"
        if param > worst.param:
            worst.param, worst.param_at = param, f"{param_at} at step {step + 1}"
    return {"losses": found[0].losses, "plain_losses": [record.loss for record in plain]} | vars(worst)


def compare_plain(rank: int, world: int, host: str, port: int, folder: str, reference: str) -> dict[str, Any]:
    """A plain run against another plain run (of another precision): the error that is not the layout's."""
    records = [StepRecord(**value) for value in torch.load(Path(folder) / "plain.pt", weights_only=True)]
    other = [StepRecord(**value) for value in torch.load(Path(reference) / "plain.pt", weights_only=True)]
    grad, grad_at = 0.0, ""
    whole = Shards([], dict.fromkeys(records[0].params), [r.grads for r in records], [r.params for r in records])
    for step in range(min(len(records), len(other))):
        error, where = _largest([whole], other[step].grads, "grads", step)
        if error > grad:
            grad, grad_at = error, where
    loss = abs(records[0].loss - other[0].loss) / abs(other[0].loss)
    return {"loss": loss, "grad": grad, "grad_at": grad_at}
