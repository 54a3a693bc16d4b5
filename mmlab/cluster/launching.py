"""Starting a generation of a run on the engines."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mmlab.cluster.engine_info import EngineInfo, EngineLost
from mmlab.cluster.engines import ANSWER, Engines
from mmlab.cluster.registry import this_process
from mmlab.errors import LabError, MmlabError
from mmlab.messages import (
    ENDED,
    Ack,
    Command,
    EventLog,
    Failure,
    Inbox,
    RunPaths,
    new_command,
    read_beacons,
    read_events,
    read_failures,
    read_json,
    send,
    write_failure,
    write_json,
)
from mmlab.messages.moves import forget_move, moving_on, save_move, take_plan
from mmlab.plan import Plan
from mmlab.plan.upkeep import ClusterConfig

IMPORTS = 180.0
"""Seconds in which an engine imports torch and opens the store, on a machine with other work too."""
FREE_HUNG = 3.0
"""Seconds in which a hung rank comes free when it is interrupted; then its process is ended."""
TICK = 0.1
"""Seconds between looks at whether engines are up."""
FREE = 15.0
"""Seconds in which engines must be free of the run before; then they are replaced."""


@dataclass(frozen=True)
class Again:
    """That a run is to go on in another generation: the checkpoint that it begins from ("latest": the newest; None:
    from the beginning), and why, in one sentence. Its plan is then what `plan.toml` says: perhaps of another layout."""

    restore: str | None
    reason: str


@dataclass(frozen=True)
class Recovery:
    """A failure that a run was, or is to be, recovered from: when it was noticed (`time.monotonic`), the first rank to
    fail, which attempt within the window, and the process of the rank's engine (0: it had none)."""

    noticed: float
    failure: Failure
    attempt: int
    pid: int


@dataclass
class ActiveRun:
    """A run in this lab's care: its folder, generation, and the engine of each rank once it has started."""

    paths: RunPaths
    generation: int
    restore: str | None
    world: int
    engines: list[EngineInfo] = field(default_factory=list)
    state: str = "queued"
    reason: str = ""
    offset: int = 0
    lineage: str = ""
    step: int = 0
    noticed: float = 0.0
    looked: float = 0.0
    again: Again | None = None
    """Set by `watch` when this generation is over and the keeper is to start the next one."""
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    before: list[EngineInfo] = field(default_factory=list)
    """The engines of the generation before, in rank order: those that live keep their ranks."""
    history: list[Recovery] = field(default_factory=list)
    """What the run was recovered from, oldest first."""
    recovering: Recovery | None = None
    """What this generation is to recover from, until it has done a step."""
    stepped: bool = False
    """Whether this generation has done a step."""
    marks: tuple[float, ...] = ()
    moved: float = 0.0
    """When the beacons last changed (`time.monotonic`), and as what: `marks`."""
    glanced: float = 0.0
    begun: int = 0
    """The step that its lineage begins with."""
    shrunk_from: Plan | None = None
    """The plan that this generation has too few engines for, until it is at work in a smaller layout."""
    growing: bool = False
    """Whether somebody waits for the engines of its full layout."""
    tidied: bool = False
    """Whether nothing of it is on its way any more, since it has ended."""
    after: bool = False
    """Whether it waits until every other run of the lab has ended."""

    def emit(self, kind: str, **fields: Any) -> None:
        """Append an event in the name of the lab. Where it cannot be written, the lab goes on and ends all the same."""
        with contextlib.suppress(OSError):
            log = EventLog(self.paths.events, self.lineage)
            try:
                log.emit(kind, **{"step": self.step, **fields})
            finally:
                log.close()

    def fail(self, first: Failure, reason: str) -> None:
        """Write that the run has failed: the first rank to fail, and why."""
        where = {"rank": first.rank, "role": first.role, "phase": first.phase, "log": str(self.paths.log(first.rank))}
        self.step = first.step
        self.emit("state", state="failed", reason=reason, cause=first.kind, **where)
        self.state = "failed"

    def read(self) -> None:
        """Take in the events that came since the last look."""
        events, self.offset = read_events(self.paths.events, self.offset)
        for event in events:
            self.lineage = event.get("lineage") or self.lineage
            if event["kind"] != "checkpoint":  # one that is written beside the training is of an earlier step
                self.step = event.get("step", self.step)
            self.stepped |= event["kind"] == "step"
            if event["kind"] == "lineage":
                self.begun = event["parent_step"]
            if event["kind"] == "state" and not self.ended:  # what comes after the end is another generation's
                self.state, self.reason = event["state"], event.get("reason", "")

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
    run.state, run.stepped, run.after = "queued", False, bool(request.get("after"))
    with contextlib.suppress(MmlabError):  # the ranks say what is wrong with it
        run.cluster = Plan.load(paths.plan).cluster
    mine = {"keeper": this_process(), "recovers": run.cluster.max_recoveries > 0}
    write_json(paths.run, info | mine | {"generation": run.generation, "engines": []})
    inbox = Inbox(paths.control)
    for command in inbox.pending():
        if command.time < request["time"]:  # meant for a generation that has ended
            inbox.answer(Ack(command.id, False, run.step, [], "the run had ended", time.time()))
    return run


def go_on(run: ActiveRun) -> ActiveRun:
    """The next generation of a run whose `again` says so: queued under the same keeper, its plan read anew."""
    assert run.again is not None
    move = moving_on(run.paths, run.generation)
    moves = move is not None and move.name == run.again.restore and not move.notice
    if move is not None and moves:
        take_plan(run.paths, move)
    else:
        save_move(run.paths)
    info = read_json(run.paths.run) or {}
    plan = Plan.load(run.paths.plan)
    following = ActiveRun(run.paths, run.generation + 1, run.again.restore, plan.world_size, cluster=plan.cluster)
    following.read()
    following.before, following.history, following.recovering = run.engines or run.before, run.history, run.recovering
    following.shrunk_from = run.shrunk_from
    if following.state == "paused" and run.again.restore is None:  # what a checkpoint is restored for, pauses there
        send(run.paths.control, new_command("pause", source="recovery"))
    said = ("starting", run.again.reason)
    if (following.state, following.reason) != said:  # first: else the state before is taken for this generation's
        following.emit("state", state="starting", reason=run.again.reason)
    more = {"generation": following.generation, "world_size": plan.world_size, "engines": []}
    write_json(run.paths.run, info | more | {"recovers": plan.cluster.max_recoveries > 0})
    if not moves:
        forget_move(run.paths)
    following.state, following.stepped = "queued", False
    return following


def refuse(request: dict[str, Any], reason: str) -> None:
    """Write that a run could not be taken over: nobody is to wait for it."""
    run = ActiveRun(RunPaths(Path(request["run_dir"])), int(request["generation"]), None, 0)
    run.emit("state", state="failed", reason=reason)


class Lacking(LabError):
    """Engines that a run had are lacking, and are not replaced in time: `there` are up."""

    def __init__(self, there: int, message: str) -> None:
        super().__init__(message)
        self.there = there


class Stopped(Exception):
    """The run was stopped before it started."""


def launch(run: ActiveRun, engines: Engines, idle: Callable[[], bool], closing: Callable[[], bool]) -> None:
    """Start a run on the engines; waits for engines that are lacking, or busy with the run before.

    What goes wrong once ranks have been told to start is written down as a failure of the run. Before that: LabError
    when the engines cannot be had; Stopped when the run is stopped, or the lab closed, while it waits.
    """

    def check() -> None:
        if closing() or stop_requested(run):
            raise Stopped

    check()  # before engines are started for a run that was stopped while it was queued
    engines.ensure(run.world + run.cluster.spares)
    if run.recovering is None:
        run.emit("state", state="starting", reason=f"waiting for {run.world} engines")
    _end_hung(run, engines)
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
            "recovers": run.cluster.max_recoveries > 0,
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


def _end_hung(run: ActiveRun, engines: Engines) -> None:
    """End the engines of ranks which the generation before found hung, unless they come free within FREE_HUNG."""
    past = read_failures(run.paths.failures, run.generation - 1)
    hung = {failure.rank for failure in past if failure.kind == "hung" and failure.rank < len(run.before)}
    end = time.monotonic() + FREE_HUNG
    while hung and time.monotonic() < end:
        left = {b.rank for b in read_beacons(run.paths.ranks) if b.generation != run.generation - 1 or b.done}
        hung -= left | {rank for rank in hung if engines.lost(run.before[rank])}
        time.sleep(0.05)
    for rank in hung:
        engines.kill(run.before[rank])


def _write_refused(run: ActiveRun, engines: Engines, error: LabError) -> None:
    """Some ranks may have started: a failure record frees them from the rendezvous, and `watch` reports it."""
    died = error.engine.id if isinstance(error, EngineLost) else None
    lost = [rank for rank, engine in enumerate(run.engines) if engine.id == died or engines.lost(engine)]
    for rank in lost:
        write_lost(run, rank, run.engines[rank])
    if not lost:
        write_failure(run.paths.failures, run.generation, Failure(0, "rank 0", "start", 0, "exception", str(error)))


def _gather(run: ActiveRun, engines: Engines, idle: Callable[[], bool], check: Callable[[], None]) -> list[EngineInfo]:
    """As many free engines as the run has ranks, each rank on the engine that it had before, if that lives.

    Waits for the run before, which may still be saving; engines that stay busy after it has ended are replaced.
    """
    since: float | None = None
    began = time.monotonic()
    while True:
        check()
        up = engines.up()
        lacking = len(up) < run.world or not engines.connected
        late = time.monotonic() - began > engines.config.start_timeout
        if lacking and run.before and run.cluster.elastic and engines.connected and (engines.problem or late):
            why = engines.problem or f"no engine came within {engines.config.start_timeout:g} s"
            raise Lacking(len(up), why)
        if lacking and engines.problem:
            raise LabError(engines.problem)
        if lacking or not idle():
            engines.ensure(run.world + run.cluster.spares)
            time.sleep(0.05)
            continue
        team = choose(up, run.world, run.before, run.cluster.anchors, _lasting(run, engines, up))
        states = engines.call(team, "state", [(str(run.paths.root),)] * len(team), ANSWER)
        blind = sorted({engine.host for engine, state in zip(team, states, strict=True) if not state["sees"]})
        if blind:
            folder, who = run.paths.root, ", ".join(blind)
            raise LabError(f"{who} cannot see the run's folder {folder}; set MMLAB_RUNS to one that all hosts share")
        busy = [engine for engine, state in zip(team, states, strict=True) if state["busy"]]
        if not busy:
            return team
        since = since or time.monotonic()
        if time.monotonic() - since > FREE:
            for engine in busy:  # its training thread does not come back
                engines.kill(engine)
            since = None
        time.sleep(0.1)


def choose(
    up: list[EngineInfo],
    world: int,
    before: list[EngineInfo],
    anchors: Sequence[int] = (),
    lasting: Sequence[EngineInfo] = (),
) -> list[EngineInfo]:
    """The engines of `world` ranks: those that ranks had before and that live, else free ones, of the same host if
    there is one; in order of hosts, so that neighbouring ranks share one. `anchors` are ranks that get one of
    `lasting`, of which there are enough."""
    hosts = list(dict.fromkeys(engine.host for engine in up))
    own = {rank: engine for rank, engine in enumerate(before[:world]) if engine in up}
    kept = {rank: own[rank] for rank in anchors if own.get(rank) in lasting}
    for rank in (rank for rank in anchors if rank not in kept):
        there = [engine for engine in lasting if engine not in kept.values()]
        kept[rank] = ([engine for engine in there if engine not in own.values()] or there)[0]
    kept |= {r: engine for r, engine in own.items() if r not in anchors and engine not in kept.values()}
    free = [e for e in sorted(up, key=lambda engine: hosts.index(engine.host)) if e not in kept.values()]
    for rank in (rank for rank in range(world) if rank not in kept):
        near = [engine for engine in free if rank < len(before) and engine.host == before[rank].host]
        kept[rank] = (near or free)[0]
        free.remove(kept[rank])
    return [kept[rank] for rank in range(world)]


def _lasting(run: ActiveRun, engines: Engines, up: list[EngineInfo]) -> list[EngineInfo]:
    """The engines on hosts that nobody takes away, of which each of `cluster.anchors` is to have one."""
    anchors = run.cluster.anchors
    if not anchors:
        return []
    spot = engines.call(up, "expendable", [(run.cluster.notices,)] * len(up), ANSWER)
    lasting = [engine for engine, goes in zip(up, spot, strict=True) if not goes]
    if len(lasting) < len(anchors):
        hosts = ", ".join(sorted({engine.host for engine in up if engine not in lasting}))
        raise LabError(
            f"cluster.anchors names {len(anchors)} ranks that must not be on expendable hosts, but {len(lasting)} of "
            f"{len(up)} engines are on others ({hosts} may be taken away at any time); name fewer ranks, or start more "
            "engines on lasting hosts (MMLAB_EXPENDABLE=0 says that a host is one)"
        )
    return lasting


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


def stop_requested(run: ActiveRun, answer: bool = True) -> bool:
    """Whether a stop waits in the run's inbox; only for runs that have not started, whose rank 0 would read it."""
    inbox = Inbox(run.paths.control)
    for command in inbox.pending():
        if command.verb in ("stop", "abort"):
            if answer:
                inbox.answer(Ack(command.id, True, run.step, [], "stopped before it started", time.time()))
            return True
    return False


def write_lost(run: ActiveRun, rank: int, engine: EngineInfo) -> None:
    """Write down that the process of a rank has ended, unless it had left the run or has said why itself."""
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
