"""`torchrun --nproc-per-node N -m mmlab.train PLAN [key=value ...]`: a run without ipyparallel."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from mmlab.errors import LabError, MmlabError, PlanError
from mmlab.messages import RunPaths, read_events, read_failures, read_json
from mmlab.messages.moves import read_move
from mmlab.messages.runs import TORCHRUN, create_run, runs_root, take_over_move
from mmlab.plan import Plan
from mmlab.train.job import Job
from mmlab.train.worker import run_worker

RUN_KEY = "mmlab/run"
SAY_EVERY = 2.0
"""Seconds between lines about the steps done."""
SEEN = 60.0
"""Seconds in which what rank 0 writes into the run's folder is seen by the other ranks."""
USAGE = "usage: torchrun --nproc-per-node N -m mmlab.train PLAN [key=value ...]"


def prepare(plan: Plan, world_size: int) -> Path:
    """Check the plan against the number of processes and make the run's folder (rank 0)."""
    if plan.world_size != world_size:
        raise PlanError(
            f"the plan needs {plan.world_size} ranks and torchrun started {world_size}; "
            f"use --nproc-per-node {plan.world_size}"
        )
    plan.check().raise_if_any()
    more = {"generation": 1, "launcher": TORCHRUN}
    return create_run(runs_root(), plan.name, plan.dumps(), world_size, plan.train.steps, **more).root


def _agree_on_run(arguments: list[str], rank: int, world_size: int, store: dist.Store) -> Path:
    """Rank 0 checks the plan and makes the folder; the others learn its name, or that there is none."""
    if rank != 0:
        name = store.get(RUN_KEY).decode()
        if not name:
            raise MmlabError("rank 0 refused the plan")
        return Path(name)
    try:
        plan = Plan.load(arguments[0]).with_(*arguments[1:])
        run_dir = prepare(plan, world_size)
    except MmlabError as error:
        print(error, file=sys.stderr)
        store.set(RUN_KEY, "")
        raise
    print(f"run {run_dir}", flush=True)
    store.set(RUN_KEY, str(run_dir))
    return run_dir


@contextmanager
def _says_steps(paths: RunPaths) -> Iterator[None]:
    """Meanwhile print a line every few seconds, and the state when it changes: what a job's log should show."""
    ended = threading.Event()

    def follow() -> None:
        offset, last = 0, False
        while not last:
            last = ended.wait(SAY_EVERY)
            events, offset = read_events(paths.events, offset)
            steps = [event for event in events if event["kind"] == "step"]
            if steps:
                print(f"step {steps[-1]['step']}  loss {steps[-1]['loss']:.4f}", flush=True)
            for event in events:
                if event["kind"] == "state" and event["state"] != "failed":
                    print(event["state"], flush=True)

    thread = threading.Thread(target=follow, name="mmlab-says", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(5.0)


def _next_generation(paths: RunPaths, job: Job) -> Job:
    """This rank's part of the generation that takes up the state which the one before has left."""
    move = read_move(paths)
    assert move is not None  # written before any rank has left, removed when all have read it
    if job.rank == 0:
        events, _ = read_events(paths.events)
        take_over_move(paths, move, events[-1]["lineage"])
    end = time.monotonic() + SEEN
    while (read_json(paths.run) or {}).get("generation") != move.generation:  # the new plan is there
        if time.monotonic() > end:
            raise LabError(f"rank 0 did not begin generation {move.generation} of {paths.root}")
        time.sleep(0.05)
    return replace(job, generation=move.generation, restore=move.name)


def main(arguments: list[str]) -> int:
    """Exit code: 0 done or stopped, 1 the input is at fault, 2 the run failed."""
    if not arguments or "RANK" not in os.environ:
        print(USAGE, file=sys.stderr)
        return 1
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False)  # torchrun's agent holds it
    try:
        run_dir = _agree_on_run(arguments, rank, world_size, store)
    except MmlabError as error:
        return error.exit_code
    job = Job(str(run_dir), rank, world_size, host, port)
    paths = RunPaths(run_dir)
    with _says_steps(paths) if rank == 0 else nullcontext():
        while (state := run_worker(job)) == "moved":
            job = _next_generation(paths, job)
    if state != "failed":
        return 0
    if rank == 0:
        events, _ = read_events(paths.events)
        reasons = [e["reason"] for e in events if e.get("state") == "failed"]
        print(reasons[-1] if reasons else "the run failed", file=sys.stderr)
    failures = read_failures(paths.failures, job.generation)
    return 1 if failures and failures[0].kind == "input" else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
