"""Making the folder of a run: the same for labs, the command line and torchrun."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path
from typing import Any

from mmlab.errors import PlanError
from mmlab.messages.events import EventLog
from mmlab.messages.files import RunPaths, read_json, write_atomic, write_json
from mmlab.messages.moves import Move, take_plan

TORCHRUN = "torchrun"
"""`launcher` in `run.json` of a run that torchrun started: its number of ranks stays."""


def runs_root() -> Path:
    """Where runs go: the folder in MMLAB_RUNS, else ./runs."""
    return Path(os.environ.get("MMLAB_RUNS") or "runs").absolute()


def create_run(root: Path, name: str, plan_toml: str, world_size: int, steps: int, **more: Any) -> RunPaths:
    """Make a run's folder with its plan and `run.json`, in state "queued"; PlanError when it cannot be written.

    `run.json`: {"id", "created" (seconds since the epoch), "generation" (0), "world_size", "steps" (planned)} and
    `more`.
    """
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"
    stamp = time.strftime("%Y%m%d-%H%M%S")
    record = {"generation": 0, "world_size": world_size, "steps": steps} | more
    try:
        root.mkdir(parents=True, exist_ok=True)
        paths = _new_folder(root, f"{stamp}-{plain}")
        write_atomic(paths.plan, plan_toml.encode())
        write_json(paths.run, {"id": paths.root.name, "created": time.time()} | record)
        log = EventLog(paths.events)
        log.emit("state", state="queued", step=0, reason="")
        log.close()
    except OSError as error:
        raise PlanError(
            f"runs cannot be written to {root}: {error.strerror or error}; set MMLAB_RUNS to a folder that can"
        ) from None
    return paths


def take_over_move(paths: RunPaths, move: Move, lineage: str) -> None:
    """Make a run's next generation the one that takes up a state on its way: its plan, its number, its ranks."""
    take_plan(paths, move)
    log = EventLog(paths.events, lineage)  # first: else the state before is taken for this generation's
    log.emit("state", state="starting", step=move.step, reason=move.reason)
    log.close()
    info = read_json(paths.run) or {}
    write_json(paths.run, info | {"generation": move.generation, "world_size": move.after, "engines": []})


def _new_folder(root: Path, name: str) -> RunPaths:
    """A folder of that name, or of the next free one where several runs start in one second."""
    attempt = 1
    while True:
        paths = RunPaths(root / (name if attempt == 1 else f"{name}-{attempt}"))
        with contextlib.suppress(FileExistsError):
            paths.root.mkdir()
            paths.create()
            return paths
        attempt += 1
