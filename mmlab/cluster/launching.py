"""Starting a generation of a run on the engines, and noticing when it loses one."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmlab.cluster.engines import ANSWER, EngineInfo, EngineLost, Engines
from mmlab.cluster.registry import this_process
from mmlab.errors import LabError
from mmlab.messages import (
    ENDED,
    LEFT_UNSAID,
    Ack,
    Command,
    EventLog,
    Failure,
    Inbox,
    RunPaths,
    all_left,
    claim_report,
    read_beacons,
    read_events,
    read_failures,
    read_json,
    send,
    write_failure,
    write_json,
)
from mmlab.messages.moves import Move, forget_move, moving_on, rescue_move, take_plan
from mmlab.messages.notices import read_notices
from mmlab.plan import Plan

SURVIVORS = 1.0
"""Seconds that a surviving rank has to report a failure before the keeper does."""
IMPORTS = 180.0
"""Seconds in which an engine imports torch and opens the store, on a machine with other work too."""
LOOK = 2.0
"""Seconds between looks at whether ranks have left without a word."""
TICK = 0.1
"""Seconds between looks at whether engines are up."""
FREE = 15.0
"""Seconds in which engines must be free of the run before; then they are replaced."""


@dataclass(frozen=True)
class Again:
    """That a run is to go on in another generation: the checkpoint that it begins from ("latest": the newest), and why,
    in one sentence. Its plan is then what `plan.toml` says, which may be of another layout."""

    restore: str
    reason: str


@dataclass
class ActiveRun:
    """A run in this lab's care: its folder, generation, and the engine of each rank once it has started."""

    paths: RunPaths
    generation: int
    restore: str | None
    world: int
    engines: list[EngineInfo] = field(default_factory=list)
    state: str = "queued"
    offset: int = 0
    lineage: str = ""
    step: int = 0
    noticed: float = 0.0
    looked: float = 0.0
    again: Again | None = None
    """Set by `watch` when this generation is over and the keeper is to start the next one."""

    def emit(self, kind: str, **fields: Any) -> None:
        """Append an event in the name of the lab. Where it cannot be written, the lab goes on and ends all the same."""
        with contextlib.suppress(OSError):
            log = EventLog(self.paths.events, self.lineage)
            try:
                log.emit(kind, step=self.step, **fields)
            finally:
                log.close()

    def read(self) -> None:
        """Take in the events that came since the last look."""
        events, self.offset = read_events(self.paths.events, self.offset)
        for event in events:
            self.lineage = event.get("lineage") or self.lineage
            self.step = event.get("step", self.step)
            if event["kind"] == "state" and not self.ended:  # what comes after the end is another generation's
                self.state = event["state"]

    @property
    def ended(self) -> bool:
        """Whether this generation is over."""
        return self.state in ENDED


def take_over(request: dict[str, Any]) -> ActiveRun:
    """The run that a request asks to launch, with the keeper written into `run.json`; old commands are refused."""
    paths = RunPaths(Path(request["run_dir"]))
    info = read_json(paths.run)
    if info is None:
        raise LabError(f"{paths.root} holds no run.json")
    run = ActiveRun(paths, int(request["generation"]), request.get("restore"), int(info["world_size"]))
    run.read()
    run.state = "queued"
    write_json(paths.run, info | {"generation": run.generation, "keeper": this_process(), "engines": []})
    inbox = Inbox(paths.control)
    for command in inbox.pending():
        if command.time < request["time"]:  # meant for a generation that has ended
            inbox.answer(Ack(command.id, False, run.step, [], "the run had ended", time.time()))
    return run


def go_on(run: ActiveRun) -> ActiveRun:
    """The next generation of a run whose `again` says so: queued under the same keeper, its plan read anew."""
    assert run.again is not None
    move = moving_on(run.paths, run.generation)
    if move is not None and move.name == run.again.restore:
        take_plan(run.paths, move)
    else:
        rescue_move(run.paths)
    info = read_json(run.paths.run) or {}
    world = Plan.load(run.paths.plan).world_size
    restore: str | None = run.again.restore
    if restore == "latest" and not any(run.paths.checkpoints.glob("*/manifest.json")):
        restore = None
    following = ActiveRun(run.paths, run.generation + 1, restore, world)
    following.read()
    following.state = "queued"
    more = {"generation": following.generation, "world_size": world, "engines": []}
    write_json(run.paths.run, info | more)
    following.emit("state", state="starting", reason=run.again.reason)
    return following


def refuse(request: dict[str, Any], reason: str) -> None:
    """Write that a run could not be taken over: nobody is to wait for it."""
    run = ActiveRun(RunPaths(Path(request["run_dir"])), int(request["generation"]), None, 0)
    run.emit("state", state="failed", reason=reason)


class Stopped(Exception):
    """The run was stopped before it started."""


def launch(run: ActiveRun, engines: Engines, idle: Callable[[], bool], closing: Callable[[], bool]) -> None:
    """Start a run on the engines; waits for engines that are lacking, or busy with the run before.

    What goes wrong once ranks have been told to start is written down as a failure of the run. Before that: LabError
    when the engines cannot be had; Stopped when the run is stopped, or the lab closed, while it waits.
    """
    engines.ensure(run.world)
    run.emit("state", state="starting", reason=f"waiting for {run.world} engines")

    def check() -> None:
        if closing() or stop_requested(run):
            raise Stopped

    team = _gather(run, engines, idle, check)
    info = read_json(run.paths.run) or {}
    (store,) = engines.call(
        team[:1], "open_store", [("" if engines.batch else "127.0.0.1", engines.config.worker)], IMPORTS
    )
    check()
    jobs = [
        {
            "run_dir": str(run.paths.root),
            "rank": rank,
            "world_size": run.world,
            "store_host": store[0],
            "store_port": store[1],
            "generation": run.generation,
            "restore": run.restore,
        }
        for rank in range(run.world)
    ]
    where = {"engines": [engine.id for engine in team], "hosts": [e.host for e in team], "one_host": not engines.batch}
    write_json(run.paths.run, info | where)
    run.engines = team
    try:
        engines.call(team, "start", [(job, engines.config.worker) for job in jobs], ANSWER)
    except LabError as error:
        _write_refused(run, engines, error)


def _write_refused(run: ActiveRun, engines: Engines, error: LabError) -> None:
    """Some ranks may have started: a failure record frees them from the rendezvous, and `watch` reports it."""
    died = error.engine.id if isinstance(error, EngineLost) else None
    lost = [rank for rank, engine in enumerate(run.engines) if engine.id == died or engines.lost(engine)]
    for rank in lost:
        _write_lost(run, rank, run.engines[rank])
    if not lost:
        write_failure(run.paths.failures, run.generation, Failure(0, "rank 0", "start", 0, "exception", str(error)))


def _gather(run: ActiveRun, engines: Engines, idle: Callable[[], bool], check: Callable[[], None]) -> list[EngineInfo]:
    """As many free engines as the run has ranks: in order of hosts, so that neighbouring ranks share one.

    Waits for the run before, which may still be saving; engines that stay busy after it has ended are replaced.
    """
    since: float | None = None
    while True:
        check()
        up = engines.up()
        lacking = len(up) < run.world or not engines.connected
        if lacking and engines.problem:
            raise LabError(engines.problem)
        if lacking or not idle():
            engines.ensure(run.world)
            time.sleep(0.05)
            continue
        hosts = list(dict.fromkeys(engine.host for engine in up))
        team = sorted(up, key=lambda engine: hosts.index(engine.host))[: run.world]
        states = engines.call(team, "state", [(str(run.paths.root),)] * len(team), ANSWER)
        blind = sorted({engine.host for engine, state in zip(team, states, strict=True) if not state["sees"]})
        if blind:
            folder = run.paths.root
            raise LabError(
                f"{', '.join(blind)} cannot see the run's folder {folder}; set MMLAB_RUNS to one that all hosts share"
            )
        busy = [engine for engine, state in zip(team, states, strict=True) if state["busy"]]
        if not busy:
            return team
        since = since or time.monotonic()
        if time.monotonic() - since > FREE:
            _replace(engines, busy)
            since = None
        time.sleep(0.1)


def _replace(engines: Engines, busy: list[EngineInfo]) -> None:
    """End engines whose training thread does not come back; new ones take their place."""
    for engine in busy:
        try:
            engines.call([engine], "end", [()], 10.0)
        except LabError:
            continue  # it ended: no answer is the answer


def bring_and_send(run: ActiveRun, engines: Engines, n: int, command: Command, closing: Callable[[], bool]) -> None:
    """Have at least `n` warm engines, then give the run a command; refused where they cannot be had.

    A relayout to more ranks goes this way: the run trains on meanwhile.
    """
    wanted = engines.wanted
    engines.ensure(n)
    while not (closing() or run.ended):
        up = engines.up()
        if len(up) < n and engines.problem:
            engines.wanted = wanted
            Inbox(run.paths.control).answer(Ack(command.id, False, run.step, [], engines.problem, time.time()))
            return
        with contextlib.suppress(LabError):  # one of them ended: another comes
            if len(up) >= n and all(engines.call(up, "warmed", [()] * len(up), ANSWER)):
                break
        time.sleep(TICK)
    send(run.paths.control, command)  # a run that has ended leaves it to the next generation, which refuses it


def stop_requested(run: ActiveRun) -> bool:
    """Whether a stop waits in the run's inbox; only for runs that have not started, whose rank 0 would read it."""
    inbox = Inbox(run.paths.control)
    for command in inbox.pending():
        if command.verb in ("stop", "abort"):
            inbox.answer(Ack(command.id, True, run.step, [], "stopped before it started", time.time()))
            return True
    return False


def watch(run: ActiveRun, engines: Engines) -> None:
    """One look at a started run: take in its events, and write down the loss of an engine at once."""
    run.read()
    if not run.paths.root.is_dir():
        run.state = "stopped"  # deleted under its ranks: the next run takes their engines, or new ones in their place
    if run.ended or not run.engines:
        return
    if move := moving_on(run.paths, run.generation):
        _move_on(run, engines, move)
        return
    for rank, engine in enumerate(run.engines):
        if engines.lost(engine):
            _write_lost(run, rank, engine)
    failures = read_failures(run.paths.failures, run.generation)
    if not failures:
        _notice_left(run)
        return
    run.noticed = run.noticed or time.monotonic()
    if time.monotonic() - run.noticed < SURVIVORS:
        return
    first = failures[0]
    if claim_report(run.paths.failures, run.generation) or time.monotonic() - run.noticed > 3 * SURVIVORS:
        where = {"rank": first.rank, "role": first.role, "phase": first.phase, "log": str(run.paths.log(first.rank))}
        run.step = first.step
        run.emit("state", state="failed", reason=first.sentence(), cause=first.kind, **where)
        run.state = "failed"


def _move_on(run: ActiveRun, engines: Engines, move: Move) -> None:
    """The ranks have left with their state: the next generation begins, on engines that nobody takes away."""
    if move.notice:
        engines.notices = [notice for notice in read_notices(run.paths) if notice.kind == "leave"]
        if any(notice.pid is None and notice.host == engines.host for notice in engines.notices):
            forget_move(run.paths)
            run.emit("state", state="stopped", reason=f"{move.notice}; so is this lab, with it: restore it elsewhere")
            run.state = "stopped"
            return
    run.again = Again(move.name or "latest", move.reason)


def _notice_left(run: ActiveRun) -> None:
    """End a run whose ranks have all left without being able to say why: its engines are free again."""
    if time.monotonic() - run.looked < LOOK:
        return
    run.looked = time.monotonic()
    beacons = [b for b in read_beacons(run.paths.ranks) if b.generation == run.generation]
    if all_left(beacons, run.world):
        run.read()
        if not run.ended:
            run.emit("state", state="failed", reason=LEFT_UNSAID)
            run.state = "failed"


def _write_lost(run: ActiveRun, rank: int, engine: EngineInfo) -> None:
    folder = run.paths.failures / f"generation-{run.generation}"
    if (folder / f"rank-{rank}.json").exists():
        return
    beacons = {b.rank: b for b in read_beacons(run.paths.ranks) if b.generation == run.generation}
    beacon = beacons.get(rank)
    if beacon is not None and beacon.done:
        return  # it had left the run before
    role = beacon.role if beacon else f"rank {rank}"
    phase, step = (beacon.phase, beacon.step) if beacon else ("start", 0)
    message = f"its process (pid {engine.pid} on {engine.host}) ended"
    write_failure(run.paths.failures, run.generation, Failure(rank, role, phase, step, "lost", message))
