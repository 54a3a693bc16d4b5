"""Steps of a plan on the clock, in rank processes (`mmlab.cluster.bench` starts them)."""

from __future__ import annotations

import resource
import sys
import time
from typing import Any

import torch
import torch.distributed as dist

from mmlab.data.pipeline import DataSource
from mmlab.parallel.mesh import build_mesh, close_mesh
from mmlab.parallel.watch import Watch
from mmlab.plan import Plan
from mmlab.train.balance import settle
from mmlab.train.build import build
from mmlab.train.feed import Feed
from mmlab.train.runner import make_runner
from mmlab.train.step import Ride
from mmlab.train.worker import pick_device, set_threads

WARM_UP = 2
"""Steps before the clock counts: buffers are made, and ZeRO-3 learns the order of modules."""


def run_steps(rank: int, world: int, host: str, port: int, plan_text: str, steps: int) -> dict[str, Any]:
    """Run a plan; "seconds" of each counted step, "losses" of all, "off_device" bytes that offload keeps elsewhere on
    this rank, "peak" bytes of device memory (CUDA) or of the process (CPU) so far."""
    plan = Plan.loads(plan_text)
    layout = plan.layout()
    set_threads(plan, layout, rank)
    device = pick_device(plan, layout, rank)
    store = dist.TCPStore(host, port, is_master=False) if world > 1 else None
    mesh = build_mesh(plan, layout, rank, store, device)
    try:
        plan, _ = settle(plan, mesh)
        built = build(plan, mesh)
        runner, feed = make_runner(plan, mesh, built, Watch(telemetry=False)), Feed(plan, mesh, DataSource(plan))
        try:
            feed.reset(feed.cursors, 0)
            seconds, losses = [], []
            for step in range(1, WARM_UP + steps + 1):
                batch = feed.batch()
                began = time.perf_counter()
                result = runner.train(plan, step, batch, Ride(next_bad=feed.next_bad, next_size=plan.data.global_batch))
                if device.type == "cuda":
                    torch.cuda.synchronize(device)
                seconds.append(time.perf_counter() - began)
                losses.append(result.loss)
                feed.agree(result.next_bad)
            off = built.zero.off_device_bytes(plan) if built.zero is not None else 0
        finally:
            feed.close()
    finally:
        close_mesh(mesh)
    return {"seconds": seconds[WARM_UP:], "losses": losses, "off_device": off, "peak": peak_bytes(device)}


def peak_bytes(device: torch.device) -> int:
    """Most bytes of device memory that were allocated, on CPU of resident memory of the process; since its start."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
