"""Steps of a plan on the clock, in rank processes (`mmlab.cluster.bench` and `mmlab.cluster.link` start them)."""

from __future__ import annotations

import contextlib
import dataclasses
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mmlab.data.pipeline import DataSource
from mmlab.parallel.mesh import Mesh, build_mesh, close_mesh
from mmlab.parallel.watch import Watch
from mmlab.plan import Plan
from mmlab.plan.schema import MODULES
from mmlab.train.balance import settle
from mmlab.train.build import build
from mmlab.train.feed import Feed
from mmlab.train.runner import make_runner
from mmlab.train.step import Ride
from mmlab.train.worker import pick_device, set_threads

WARM_UP = 2
"""Steps before the clock counts: buffers are made, and ZeRO-3 learns the order of modules."""
LEAST = 3
"""Counted steps of a run for a time, however slow they are."""


def run_steps(rank: int, world: int, host: str, port: int, plan_text: str, steps: int) -> dict[str, Any]:
    """Run a plan; "seconds" of each counted step, "losses" of all, "off_device" bytes that offload keeps elsewhere on
    this rank, "peak" bytes of device memory (CUDA) or of the process (CPU) so far."""
    with _bench(rank, world, host, port, plan_text) as bench:
        for _ in range(WARM_UP + steps):
            bench.step()
        zero = bench.built.zero
        off = zero.off_device_bytes(bench.plan) if zero is not None else 0
    found = {"seconds": bench.seconds[WARM_UP:], "losses": bench.losses}
    return found | {"off_device": off, "peak": peak_bytes(bench.mesh.device)}


def run_for(
    rank: int, world: int, host: str, port: int, plan_text: str, seconds: float, interface: str, exchange: bool = True
) -> dict[str, Any]:
    """Run a plan until that many seconds of counted steps are over, as rank 0 sees it, and at least LEAST of them.

    "seconds" of each counted step, "losses" of all, "handed" the bytes of gradients that this rank has handed to
    communication in a counted step, "sent" those that left this host by a network interface, headers and all (Linux).
    Without `exchange` replicas keep their gradients for themselves: what a step takes apart from summing them (not
    under zero2, zero3 and DeepSpeed, which sum them all the same).
    """
    with _bench(rank, world, host, port, plan_text, exchange) as bench:
        for _ in range(WARM_UP):
            bench.step()
        handed, sent = bench.handed(), _sent(interface)

        def enough() -> bool:
            counted = bench.seconds[WARM_UP:]
            return rank == 0 and len(counted) + 1 >= LEAST and sum(counted) >= seconds

        while not bench.step(enough):
            pass
        steps = len(bench.seconds) - WARM_UP
        handed, sent = (bench.handed() - handed) / steps, (_sent(interface) - sent) / steps
    return {"seconds": bench.seconds[WARM_UP:], "losses": bench.losses, "handed": handed, "sent": sent}


def _sent(interface: str) -> float:
    """Bytes that have left by an interface, as the kernel counts them in this process's network namespace."""
    return float(Path(f"/sys/class/net/{interface}/statistics/tx_bytes").read_text())


class _Bench:
    """One rank's training of a plan, step by step: seconds and losses."""

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        self.plan, self.mesh = plan, mesh
        self.built = build(plan, mesh)
        self.runner = make_runner(plan, mesh, self.built, Watch(telemetry=False))
        self.feed = Feed(plan, mesh, DataSource(plan))
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.feed.reset(self.feed.cursors, 0)

    def step(self, last: Callable[[], bool] = lambda: False) -> bool:
        """Train one step; whether any rank says, while it computes, that it is the last."""
        batch = self.feed.batch()
        began = time.perf_counter()
        ride = Ride(commands=last, next_bad=self.feed.next_bad, next_size=self.plan.data.global_batch)
        result = self.runner.train(self.plan, len(self.seconds) + 1, batch, ride)
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize(self.mesh.device)
        self.seconds.append(time.perf_counter() - began)
        self.losses.append(result.loss)
        self.feed.agree(result.next_bad)
        return result.commands

    def handed(self) -> float:
        """Bytes of gradients handed to communication so far. Those that zero2 and zero3 sum are not among them: they
        are counted together with gathered weights."""
        return float(sum(self.mesh.traffic.bytes[axis] for axis in MODULES))


@contextlib.contextmanager
def _bench(rank: int, world: int, host: str, port: int, plan_text: str, exchange: bool = True) -> Iterator[_Bench]:
    plan = Plan.loads(plan_text)
    layout = plan.layout()
    set_threads(plan, layout, rank)
    device = pick_device(plan, layout, rank)
    store = dist.TCPStore(host, port, is_master=False) if world > 1 else None
    mesh = build_mesh(plan, layout, rank, store, device)
    if not exchange:
        mesh = dataclasses.replace(mesh, reductions=dict.fromkeys(mesh.reductions))
    try:
        plan, _ = settle(plan, mesh)
        bench = _Bench(plan, mesh)
        try:
            yield bench
        finally:
            bench.feed.close()
    finally:
        close_mesh(mesh)


def peak_bytes(device: torch.device) -> int:
    """Most bytes of device memory that were allocated, on CPU of resident memory of the process; since its start."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
