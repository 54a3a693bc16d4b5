"""What rank processes compute in tests of compression that changes while a run goes on."""

import contextlib
import gc
import os

import torch
import torch.distributed as dist

from mmlab.data.pipeline import DataSource
from mmlab.parallel.mesh import build_mesh, close_mesh
from mmlab.parallel.watch import Watch
from mmlab.plan import Plan
from mmlab.train.build import build
from mmlab.train.feed import Feed
from mmlab.train.step import HybridStep, Ride


def _held():
    """(bytes of all tensors that live in this process, each storage once; open files)."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):
            with contextlib.suppress(RuntimeError):  # one without memory, which another test left in this warm process
                storages[thing.untyped_storage().data_ptr()] = thing.untyped_storage().nbytes()
    return sum(storages.values()), len(os.listdir("/proc/self/fd"))


def toggled(rank, world, host, port, plan_text, cycle, rounds):
    """What this rank holds after each round of a cycle of changes, one step under each; and the losses."""
    plan = Plan.loads(plan_text)
    mesh = build_mesh(plan, plan.layout(), rank, dist.TCPStore(host, port, is_master=False), torch.device("cpu"))
    feed = Feed(plan, mesh, DataSource(plan))
    runner = HybridStep(plan, mesh, build(plan, mesh), Watch())
    held, losses, step = [], [], 0
    try:
        feed.reset(feed.cursors, 0)
        batches = []
        for _ in cycle:
            batches.append(feed.batch())
            feed.agree(frozenset())
        feed.close()  # it works ahead: what it holds is different at every look
        for _ in range(rounds):
            for changes, batch in zip(cycle, batches, strict=True):
                plan, step = plan.with_(changes), step + 1
                runner.configure(plan, step)
                losses.append(runner.train(plan, step, batch, Ride()).loss)
            held.append(_held())
    finally:
        runner.close()
        close_mesh(mesh)
    return held, losses
