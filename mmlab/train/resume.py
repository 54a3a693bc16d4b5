"""Which run the ranks that torchrun has started work on: a new one, or one that goes on from its newest checkpoint."""

from __future__ import annotations

import hashlib
import json
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mmlab.errors import MmlabError, PlanError
from mmlab.messages import (
    Ack,
    EventLog,
    Inbox,
    RunPaths,
    process_alive,
    read_beacons,
    read_events,
    read_json,
    write_atomic,
    write_json,
)
from mmlab.messages.checkpoints import location_of, manifests
from mmlab.messages.moves import rescue_move
from mmlab.messages.runs import TORCHRUN, create_run, runs_root
from mmlab.plan import Plan
from mmlab.plan.io import parse_override
from mmlab.plan.relayout import relaid
from mmlab.plan.typed import separate
from mmlab.train.job import Job

KEY = "mmlab/run"
"""Key of torchrun's store, with the number of the restart: what rank 0 has decided."""
RESUME = "MMLAB_RESUME"
"""Environment variable: a name of the job that all its starts share, so that a later one finds the run that an earlier
one has left unfinished. (torchrun's own id is a new one at each start on one host.)"""


def agree(arguments: list[str], environment: Mapping[str, str], store: dist.Store) -> Job:
    """This rank's part: rank 0 decides and says so through torchrun's store, which outlives restarts of the ranks.

    MmlabError on every rank when the input is at fault.
    """
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    restart = int(environment.get("TORCHELASTIC_RESTART_COUNT", 0))
    key = f"{KEY}/{restart}"
    if rank == 0:
        try:
            run = _before(store, restart)
            found = _resume(run, [], world, f"restart {restart}") if run else _decide(arguments, environment, world)
        except MmlabError as error:
            print(error, file=sys.stderr)
            store.set(key, "")
            raise
        print(f"run {found['run_dir']}", flush=True)
        store.set(key, json.dumps(found))
    else:
        text = store.get(key).decode()
        if not text:
            raise MmlabError("rank 0 refused the plan")
        found = json.loads(text)
    host, port = environment["MASTER_ADDR"], int(environment["MASTER_PORT"])
    return Job(rank=rank, world_size=world, store_host=host, store_port=port, **found)


def _before(store: dist.Store, restart: int) -> Path | None:
    """The run that the ranks worked on before torchrun restarted them; None without one."""
    for number in range(restart - 1, -1, -1):
        key = f"{KEY}/{number}"
        if store.check([key]) and (text := store.get(key).decode()):
            return Path(json.loads(text)["run_dir"])
    return None


def _decide(arguments: list[str], environment: Mapping[str, str], world: int) -> dict[str, Any]:
    """A run's folder goes on; so does the run that a job of the same name left unfinished; else a plan is begun."""
    if (Path(arguments[0]) / "run.json").is_file():
        return _resume(Path(arguments[0]).absolute(), arguments[1:], world, "torchrun")
    plan = Plan.load(arguments[0]).with_(*arguments[1:])
    job = environment.get(RESUME, "")
    if job and (left := _left_by(job, plan)) is not None:
        return _resume(left, [], world, f"job {job}")
    _check_world(plan, world)
    plan.check().raise_if_any()
    more = {"generation": 1, "launcher": TORCHRUN, "job": job, "asked": _asked(plan)}
    made = create_run(runs_root(), plan.name, plan.dumps(), world, plan.train.steps, **more)
    return {"run_dir": str(made.root), "generation": 1, "restore": None}


def _left_by(job: str, plan: Plan) -> Path | None:
    """The newest run of a job's name and plan that has not finished."""
    found = [(info["created"], path.parent, info) for path in runs_root().glob("*/run.json")
             if (info := read_json(path)) and info.get("job") == job]  # fmt: skip
    for _, folder, info in sorted(found, key=lambda one: one[0], reverse=True)[:1]:
        states = [event["state"] for event in read_events(folder / "events.jsonl")[0] if event["kind"] == "state"]
        if states[-1:] != ["finished"] and info.get("asked") == _asked(plan):
            return folder
    return None


def _asked(plan: Plan) -> str:
    """What tells a plan from others, in `run.json`: plan.toml changes with a relayout and a measured balance."""
    return hashlib.sha256(plan.dumps().encode()).hexdigest()


def _check_world(plan: Plan, world: int) -> None:
    if plan.world_size != world:
        raise PlanError(
            f"the plan needs {plan.world_size} ranks and torchrun started {world}; "
            f"use --nproc-per-node {plan.world_size}"
        )


def _resume(root: Path, changes: list[str], world: int, who: str) -> dict[str, Any]:
    """The next generation of a run, from its newest checkpoint (from the beginning where it has none)."""
    paths = RunPaths(root)
    info = read_json(paths.run)
    if not isinstance(info, dict) or "generation" not in info:
        raise MmlabError(f"run {root.name} cannot go on: {paths.run} is damaged")
    generation = int(info["generation"]) + 1
    for beacon in read_beacons(paths.ranks):
        here = beacon.host == socket.gethostname() and process_alive(beacon.pid, beacon.started)
        if beacon.generation == generation - 1 and here and not beacon.done:
            raise MmlabError(f"run {root.name} is at work: rank {beacon.rank} is process {beacon.pid}; stop it first")
    old = Plan.load(paths.plan)
    plan = relaid(old, dict(parse_override(one) for change in changes for one in separate(change))) if changes else old
    _check_world(plan, world)
    try:
        rescue_move(paths)
        if plan != old:
            paths.plans.mkdir(exist_ok=True)
            write_atomic(paths.plans / f"generation-{generation - 1}.toml", paths.plan.read_bytes())
            write_atomic(paths.plan, plan.dumps().encode())
        more = {"generation": generation, "world_size": world, "launcher": TORCHRUN, "keeper": None, "lab": None}
        write_json(paths.run, info | more | {"engines": []})
        _begin(paths, f"goes on ({who})")
    except OSError as error:
        raise MmlabError(
            f"run {root.name} cannot go on: {root} cannot be written ({error.strerror or error})"
        ) from None
    try:
        saved = manifests(location_of(paths, plan.checkpoint.location))
    except OSError as error:
        raise MmlabError(f"the checkpoints of run {root.name} cannot be read: {error}") from None
    return {"run_dir": str(root), "generation": generation, "restore": "latest" if saved else None}


def _begin(paths: RunPaths, reason: str) -> None:
    """Say that the run starts again, and refuse commands that were meant for the ranks before."""
    events, _ = read_events(paths.events)
    lineage = next((event["lineage"] for event in reversed(events) if event.get("lineage")), "")
    step = next((event["step"] for event in reversed(events) if "step" in event), 0)
    log = EventLog(paths.events, lineage)
    log.emit("state", state="starting", step=step, reason=reason)
    log.close()
    inbox = Inbox(paths.control)
    for command in inbox.pending():
        inbox.answer(Ack(command.id, False, step, [], "the run had ended", time.time()))
