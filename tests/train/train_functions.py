"""What tests run in rank processes."""

import contextlib
import ctypes
import datetime
import os
import signal
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from mmlab.data.pipeline import DataSource
from mmlab.messages import RunPaths, new_command, send
from mmlab.parallel import mesh as mesh_module
from mmlab.parallel.mesh import build_mesh, close_mesh
from mmlab.parallel.watch import Watch
from mmlab.plan import Plan
from mmlab.plan.schema import MODULES
from mmlab.train import session as session_module
from mmlab.train.build import build
from mmlab.train.control import UNWIND
from mmlab.train.feed import Feed
from mmlab.train.job import Job
from mmlab.train.step import HybridStep, Ride
from mmlab.train.worker import run_worker


class _FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("scripted fault inside backward")


def fail_inside_backward():
    """The next linear layer of this process that computes a gradient raises in the middle of autograd's backward."""
    real = F.linear

    def linear(x, *args):
        F.linear = real
        return real(_FailsBackward.apply(x) if x.requires_grad else x, *args)

    F.linear = linear


RELEASED = "released"
"""A file in a run's folder: the fault that waits for it is over."""


def fail_at(kind, rank, step, phase, folder=None):
    """A scripted fault: the given rank does something bad when it enters a phase of a step."""

    done = []

    def fault(at_rank, at_step, at_phase):
        if (at_rank, at_step, at_phase) != (rank, step, phase) or (kind == "inside" and done):
            return
        done.append(kind)
        if kind == "memory":
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 64 TB")
        if kind == "raise":
            raise ValueError("scripted fault")
        if kind == "inside":
            fail_inside_backward()
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        while kind == "wait" and not (Path(folder) / RELEASED).exists():
            time.sleep(0.02)
        if kind == "hang":
            while True:
                time.sleep(0.05)
        if kind == "hold":  # C code that keeps the interpreter's lock
            end = time.monotonic() + 8.0
            while time.monotonic() < end:
                ctypes.PyDLL(None).sleep(1)

    return fault


def drag(rank, step, phase):
    """A scripted fault: the given rank takes 0.1 s longer for a phase, from a step on."""
    return lambda at_rank, at_step, at_phase: (
        time.sleep(0.1) if (at_rank, at_phase) == (rank, phase) and at_step >= step else None
    )


def run(rank, world, host, port, run_dir, generation=1, restore=None, fault=None):
    job = Job(run_dir, rank, world, host, port, generation, restore)
    return run_worker(job, (drag(*fault[1:]) if fault[0] == "drag" else fail_at(*fault, run_dir)) if fault else None)


def step_results(rank, world, host, port, plan_text, steps):
    """What each step of a plan reports, and the elements of each module that trains, on all ranks together."""
    plan = Plan.loads(plan_text)
    store = dist.TCPStore(host, port, is_master=False)
    mesh = build_mesh(plan, plan.layout(), rank, store, torch.device("cpu"))
    built = build(plan, mesh)
    feed = Feed(plan, mesh, DataSource(plan))
    runner = HybridStep(plan, mesh, built, Watch())
    sizes = dict.fromkeys(MODULES, 0)
    for t in built.trained:
        sizes[t.module] += t.value.numel()
    total = torch.tensor([float(sizes[m]) for m in MODULES])
    results = []
    try:
        feed.reset(feed.cursors, 0)
        for step in range(1, steps + 1):
            batch = feed.batch()
            result = runner.train(plan, step, batch, Ride(next_bad=feed.next_bad, next_size=plan.data.global_batch))
            feed.agree(result.next_bad)
            results.append({"traffic": result.reported.traffic, "communication": result.reported.communication})
        dist.all_reduce(total, group=mesh.control)
        results[-1]["elements"] = dict(zip(MODULES, total.tolist(), strict=True))
    finally:
        feed.close()
        close_mesh(mesh)
    return results


def threads(rank, world, host, port):
    """Names of this rank's threads."""
    return [thread.name for thread in threading.enumerate()]


def meet_after_a_break(rank, world, host, port, plan_text):
    """The sum of ones over ranks, of which the last one's group before broke off while it was made."""
    plan = Plan.loads(plan_text)
    if rank == world - 1:
        with contextlib.suppress(dist.DistStoreError):
            short = datetime.timedelta(milliseconds=20)
            dist.init_process_group("gloo", store=dist.HashStore(), rank=rank, world_size=world, timeout=short)
        assert dist.distributed_c10d._world.group_count == 1
    mesh = build_mesh(plan, plan.layout(), rank, dist.TCPStore(host, port, is_master=False), torch.device("cpu"))
    try:
        ones = torch.ones(1)
        dist.all_reduce(ones, group=mesh.control)
        return ones.item()
    finally:
        close_mesh(mesh)


def persisted(rank, world, host, port, plan_text):
    """Elements that a live ZeRO-3 engine keeps whole, by module, and the sizes of what it does not."""
    plan = Plan.loads(plan_text)
    mesh = build_mesh(plan, plan.layout(), rank, dist.TCPStore(host, port, is_master=False), torch.device("cpu"))
    try:
        engine = build(plan, mesh).zero.engine
        kept, cut = {}, []
        for name, param in (engine.params | engine.frozen).items():
            if param.ds_persist:
                kept[name.split(".")[0]] = kept.get(name.split(".")[0], 0) + param.ds_numel
            else:
                cut.append((name.split(".")[0], len(param.ds_shape)))
        return kept, cut
    finally:
        close_mesh(mesh)


def aborted_at_the_end(rank, world, host, port, run_dir):
    """A run that tidies up for long enough that an abort, sent when it has finished, would interrupt that."""
    real, paths = session_module.Session.close, RunPaths(Path(run_dir))

    def close(session):
        send(paths.control, new_command("abort"))
        end = time.monotonic() + 60
        while session.listener.aborted is None and time.monotonic() < end:
            time.sleep(0.02)
        for _ in range(100):  # in Python code, where it would be raised
            time.sleep(UNWIND / 50)
        real(session)

    session_module.Session.close = close
    try:
        return run_worker(Job(run_dir, rank, world, host, port))
    finally:
        session_module.Session.close = real


def broken_mesh(rank, world, host, port, run_dir):
    """A generation in which rank 1 fails while the groups are made, when all have made some of them, and the next."""
    real, made = mesh_module._my_group, []

    def failing(groups, me, what):
        made.append(what)
        if rank == 1 and len(made) == 3:
            raise RuntimeError("scripted fault between groups")
        return real(groups, me, what)

    mesh_module._my_group = failing
    try:
        failed = run_worker(Job(run_dir, rank, world, host, port))
    finally:
        mesh_module._my_group = real
    return failed, run_worker(Job(run_dir, rank, world, host, port, generation=2))
