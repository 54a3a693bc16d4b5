"""`torchrun --nproc-per-node N -m mmlab.train PLAN|RUN [key=value ...]`: a run without ipyparallel.

Ranks that torchrun restarts go on from the newest checkpoint; so does a run whose folder takes the plan's place. On
SIGTERM and SIGUSR1 the run saves and leaves with exit code 143.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mmlab.errors import LabError, MmlabError
from mmlab.messages import EventLog, RunPaths, read_events, read_failures, read_json
from mmlab.messages.moves import Move, forget_move, read_move
from mmlab.messages.notices import SIGNALS, Notice, write_notice
from mmlab.messages.runs import take_over_move
from mmlab.train.job import Job
from mmlab.train.resume import agree
from mmlab.train.worker import run_worker

SAY_EVERY = 2.0
"""Seconds between lines about the steps done."""
SEEN = 60.0
"""Seconds in which what rank 0 writes into the run's folder is seen by the other ranks."""
LEFT = 128 + signal.SIGTERM
"""Exit code of ranks that were told to leave, as if the signal had ended them: torchrun, Kubernetes and a job script
that requeues take it for what it is, an end that calls for another start."""
USAGE = "usage: torchrun --nproc-per-node N -m mmlab.train PLAN|RUN [key=value ...]"


@contextmanager
def _says_steps(paths: RunPaths) -> Iterator[None]:
    """Meanwhile print a line every few seconds, and the state when it changes: what a job's log should show."""
    ended = threading.Event()
    known = paths.events.stat().st_size if paths.events.exists() else 0

    def follow() -> None:
        offset, last = known, False
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


def _hear_signals(paths: RunPaths) -> None:
    """A signal that announces the end of this process is a notice to the run; a second one ends it."""

    def on_signal(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        with contextlib.suppress(OSError):
            write_notice(paths, Notice("leave", signal.Signals(number).name, socket.gethostname(), os.getpid()))

    for number in SIGNALS:
        signal.signal(number, on_signal)


def _next_generation(paths: RunPaths, job: Job, move: Move) -> Job:
    """This rank's part of the generation that takes up the state which the one before has left."""
    if job.rank == 0:
        events, _ = read_events(paths.events)
        take_over_move(paths, move, events[-1]["lineage"])
    end = time.monotonic() + SEEN
    while (read_json(paths.run) or {}).get("generation") != move.generation:  # the new plan is there
        if time.monotonic() > end:
            raise LabError(f"rank 0 did not begin generation {move.generation} of {paths.root}")
        time.sleep(0.05)
    return replace(job, generation=move.generation, restore=move.name)


def _leave(paths: RunPaths, job: Job, move: Move) -> int:
    """The host or a process is being taken away: the run stops here, and goes on where it is started again."""
    if job.rank == 0:
        events, _ = read_events(paths.events)
        log = EventLog(paths.events, events[-1]["lineage"])
        log.emit("state", state="stopped", step=move.step, reason=move.notice)
        log.close()
        forget_move(paths)
        print(f"{move.notice}; it goes on with: torchrun ... -m mmlab.train {paths.root}", flush=True)
    return LEFT


def main(arguments: list[str]) -> int:
    """Exit code: 0 done or stopped, 1 the input is at fault, 2 the run failed, 143 told to leave."""
    if not arguments or "RANK" not in os.environ:
        print(USAGE, file=sys.stderr)
        return 1
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False)  # torchrun's agent holds it
    try:
        job = agree(arguments, os.environ, store)
    except MmlabError as error:
        return error.exit_code
    paths = RunPaths(Path(job.run_dir))
    _hear_signals(paths)
    with _says_steps(paths) if job.rank == 0 else nullcontext():
        while (state := run_worker(job)) == "moved":
            move = read_move(paths)
            if move is None or move.notice:  # rank 0 may have ended it already
                break
            job = _next_generation(paths, job, move)
        if state == "moved":
            return _leave(paths, job, move) if move is not None else LEFT
    if state != "failed":
        return 0
    if job.rank == 0:
        events, _ = read_events(paths.events)
        reasons = [e["reason"] for e in events if e.get("state") == "failed"]
        print(reasons[-1] if reasons else "the run failed", file=sys.stderr)
    failures = read_failures(paths.failures, job.generation)
    return 1 if failures and failures[0].kind == "input" else 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
