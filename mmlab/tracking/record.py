"""The reading side of a run: its state, events, metrics, checkpoints and logs, from the files alone.

Works for live and ended runs, from any process, without engines and without torch.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmlab.errors import CheckpointError, MmlabError
from mmlab.messages import ENDED, Event, read_events
from mmlab.messages.beacon import LEFT_UNSAID, BeaconState, all_left, read_beacons
from mmlab.messages.checkpoints import Found, chain, location_of, newest_first
from mmlab.messages.control import read_command
from mmlab.messages.events import last_of, last_steps, lines_back, live_values, parse_event, planned_steps
from mmlab.messages.failures import Failure, read_failures
from mmlab.messages.files import RunPaths, process_alive, read_json
from mmlab.messages.locations import Location
from mmlab.messages.moves import falls_back, moving_on
from mmlab.messages.runs import runs_root
from mmlab.tracking import checkpoints
from mmlab.tracking.bottleneck import SKIPPED, Bottleneck
from mmlab.tracking.compression import CompressionTable, telling
from mmlab.tracking.ledger import Ledger
from mmlab.tracking.logs import UPDATE, LogTail
from mmlab.tracking.placement import Placement, Seen
from mmlab.tracking.rare import Rare
from mmlab.tracking.tables import WINDOW
from mmlab.tracking.traced import MeasuredSchedule, Traces
from mmlab.tracking.traffic import TrafficTable

if TYPE_CHECKING:
    from mmlab.plan import Plan

LIVE = ("starting", "running", "paused")
"""States in which its ranks should be alive."""
SETTLE = 1.2
"""Seconds in which a rank with a cause of its own may come after those that only noticed that a peer had gone."""


class RunRecord:
    """What the folder of a run says. Events are read once and then only what was appended."""

    def __init__(self, run_dir: str | Path) -> None:
        self.paths = RunPaths(Path(run_dir).absolute())
        if not self.paths.run.is_file():
            raise MmlabError(f"{run_dir} is not the folder of a run: it holds no run.json; `mmlab runs` lists runs")
        self._events: list[Event] = []
        self._offset = 0
        self._lock = threading.Lock()
        self._rare = Rare(self.paths.events)
        self._plan: Plan | None = None
        self._plan_file = (0, 0)
        self._host = socket.gethostname()
        self._traces = Traces(self.paths.traces)

    @property
    def id(self) -> str:
        """The name of the run's folder."""
        return self.paths.root.name

    @property
    def info(self) -> dict[str, Any]:
        """`run.json`: id, created, generation, world_size, and for runs of a lab: lab (its folder), engines, keeper."""
        return read_json(self.paths.run) or {}

    @property
    def plan(self) -> Plan:
        """The plan that the run was started with, and what was measured at its start or changed by a relayout.
        MmlabError where the run was deleted before anybody read it."""
        from mmlab.plan import Plan

        with contextlib.suppress(OSError):
            now = os.stat(self.paths.plan)
            if self._plan is None or self._plan_file != (now.st_ino, now.st_mtime_ns):
                self._plan = Plan.load(self.paths.plan)
                self._plan_file = (now.st_ino, now.st_mtime_ns)
        if self._plan is None and not self.paths.run.is_file():
            raise MmlabError(f"run {self.id} was deleted: {self.paths.root} is gone")
        return self._plan or Plan.load(self.paths.plan)

    def events(self) -> list[Event]:
        """All events so far, oldest first."""
        with self._lock:  # views ask from several threads
            new, self._offset = read_events(self.paths.events, self._offset)
            self._events.extend(new)
            return list(self._events)

    def rare_events(self) -> list[Event]:
        """All events so far but those of steps, oldest first: cheap also for long runs."""
        return self._rare.events()

    def last_steps(self) -> dict[str, int]:
        """The last step of each lineage that has done one."""
        return self._rare.last()

    def beacons(self) -> list[BeaconState]:
        """What each rank of the current generation does, in rank order."""
        generation = self.info.get("generation", 0)
        return [state for state in read_beacons(self.paths.ranks) if state.generation == generation]

    def lineages(self) -> list[Event]:
        """The current lineage and its ancestors, newest first, as lineage events (id, parent, parent_step)."""
        return chain(self.rare_events())

    def metrics(self) -> list[Event]:
        """One dict a step of the current lineage, what it inherits from its ancestors included, by step."""
        events = self.events()
        limit = last_steps(chain(events))
        steps = (event for event in events if event["kind"] == "step")
        kept = [event for event in steps if event["step"] <= limit.get(event["lineage"], -1)]
        by_step = {event["step"]: event for event in kept}
        return [{key: value for key, value in by_step[step].items() if key != "kind"} for step in sorted(by_step)]

    def steps_back(self) -> Iterator[Event]:
        """The steps of `metrics`, the newest first, read from the end of the log as far as they are asked for."""
        limit, below = last_steps(self.lineages()), float("inf")
        for line in lines_back(self.paths.events):
            event = parse_event(line)
            if event is None or event["kind"] != "step":
                continue
            if event["step"] < min(below, limit.get(event["lineage"], -1) + 1):
                below = event["step"]
                yield event

    def traffic(self) -> TrafficTable:
        """What the ranks said to each other in the last steps: groups, bytes, time under way and waited for."""
        return TrafficTable(self.plan.layout(), self._recent())

    def placement(self, state: str = "", steps: list[Event] | None = None) -> Placement:
        """Where the ranks are and how each of them is. Faces that follow the log give state and last steps."""
        state = state or self.status()["state"]
        steps = self._recent() if steps is None else steps
        seen = Seen(state, self.beacons(), self.info.get("engines", []), self.failures(), steps)
        return Placement(self.plan, seen)

    def bottleneck(self) -> Bottleneck:
        """What holds the run back, from the times of the last steps."""
        return Bottleneck(self.live_plan(), self._recent())

    def ledger(self) -> Ledger:
        """Which samples each step consumed, whether none was lost and none came twice. MmlabError before any step."""
        return Ledger(self)

    def compression(self) -> CompressionTable:
        """What the last steps' gradients were coded with, what that saved, cost and lost."""
        return CompressionTable(telling(self._in_this_layout()))

    def _recent(self) -> list[Event]:
        """As many of the last steps as faces that follow the log keep, oldest first."""
        return list(islice(self._in_this_layout(), WINDOW + SKIPPED))[::-1]

    def _in_this_layout(self) -> Iterator[Event]:
        """The steps of the current lineage since the last relayout, the newest first: earlier ones have other ranks."""
        lineages = {event["id"] for event in self.lineages()}
        moves = [e["step"] for e in self.rare_events() if e["kind"] == "relayout" and e["lineage"] in lineages]
        since = max(moves, default=-1)
        return takewhile(lambda event: event["step"] > since, self.steps_back())

    def live_plan(self) -> Plan:
        """The run's plan with what commands and restores have made of its live fields."""
        from mmlab.plan import set_live

        values: dict[str, Any] = {}
        for event in self.rare_events():
            values = live_values(values, event)
        return set_live(self.plan, values) if values else self.plan

    def last_step(self) -> Event | None:
        """The newest step event, of any lineage; None before the first step."""
        return self._rare.newest_step()

    def last_state(self) -> str:
        """The state that the events give; `status` sees a loss earlier."""
        return str(last_of(self.rare_events(), "state").get("state", "queued"))

    def status(self) -> dict[str, Any]:
        """The state of the run right now.

        {"state", "step", "steps" (planned), "reason", "generation", "lineage", "id", "ranks": [{"rank", "role",
        "engine", "pid", "host", "alive", "phase", "step"}]}. All of one generation: `ranks` are those of it that have
        begun (all once it is running, none while it waits for engines). `alive` is None for ranks of other hosts. A run
        whose ranks left without a word is "failed" once their processes are gone, one whose folder is gone "deleted".
        """
        info = self.info  # before the log, in which a generation says that it starts before it is in run.json
        events = self.rare_events()
        last = last_of(events, "state") or {"state": "queued"}
        lineages = chain(events)
        found = {
            "id": self.id,
            "step": self._step(lineages),
            "steps": planned_steps(events, int(info.get("steps", 0))),
            "lineage": lineages[0]["id"] if lineages else "",
            **self.present(last["state"], last.get("reason", "")),
        }
        ended = found["state"] == "failed" and self.last_state() in ("finished", "stopped")
        if ended or found["generation"] != info.get("generation", 0):  # meanwhile: it did, or the next one began
            return self.status()
        return found

    def present(self, state: str, reason: str = "") -> dict[str, Any]:
        """What beacons, failure records and processes say beside the last state event: {"state", "reason",
        "generation", "ranks"} as in `status`, without the event log (faces that follow it ask often). All of one
        generation where that is the one of before the log was read."""
        if not self.paths.run.is_file():
            return {"state": "deleted", "reason": f"{self.paths.root} is gone", "generation": 0, "ranks": []}
        beacons = read_beacons(self.paths.ranks)  # first: the engines of ranks are in run.json before they begin
        info = self.info
        generation = info.get("generation", 0)
        beacons = [beacon for beacon in beacons if beacon.generation == generation]
        if state not in ENDED and (move := moving_on(self.paths, generation)):
            state, reason = "starting", move.reason
        elif state not in ENDED and (failure := self._failure(info, beacons, state)):
            recovers = self._recovers(info, generation) or falls_back(self.paths, generation)
            state, reason = ("starting", f"about to recover: {failure}") if recovers else ("failed", failure)
        ranks = [self._rank(beacon, info, state) for beacon in beacons]
        last = self.info.get("generation", 0)  # another than that of what was read: whoever asks looks again
        return {"state": state, "reason": reason, "generation": last, "ranks": ranks}

    def cause(self) -> str:
        """The kind of the first failure of this generation (`messages.Failure`): "input" when the user's plan or data
        is at fault; empty when nothing failed or nobody could say why."""
        failures = self.failures()
        return failures[0].kind if failures else str(last_of(self.rare_events(), "state").get("cause", ""))

    def stopping(self) -> bool:
        """Whether a stop or an abort was sent and has not been carried out yet, or only just."""
        waiting = [read_command(path) for path in self.paths.control.glob("*.json")]
        if any(command is not None and command.verb in ("stop", "abort") for command in waiting):
            return True
        last = next((e for e in reversed(self.rare_events()) if e["kind"] in ("command", "state")), {"kind": "state"})
        return last["kind"] == "command" and last["verb"] in ("stop", "abort") and bool(last["ok"])

    def failures(self) -> list[Failure]:
        """Failure records of the current generation, causes first."""
        return read_failures(self.paths.failures, self.info.get("generation", 0))

    def _failure(self, info: dict[str, Any], beacons: list[BeaconState], state: str) -> str:
        """Why a run that has not ended by its events has failed nevertheless; empty when it has not."""
        failures = read_failures(self.paths.failures, info.get("generation", 0))
        if failures and failures[0].kind != "peer":
            return failures[0].sentence()
        for beacon in beacons:
            here = beacon.host == self._host
            if state in LIVE and here and not beacon.done and not process_alive(beacon.pid, beacon.started):
                message = "its process ended"
                return Failure(beacon.rank, beacon.role, beacon.phase, beacon.step, "lost", message).sentence()
        if failures and time.time() - failures[0].time > SETTLE:
            return failures[0].sentence()
        if state in LIVE and all_left(beacons, info.get("world_size", -1)):
            return LEFT_UNSAID
        return "the lab that was running it has ended" if self._lab_ended(info) else ""

    def _recovers(self, info: dict[str, Any], generation: int) -> bool:
        """Whether a keeper that lives decides what becomes of a failure: until it has spoken, the run has not failed.

        What the user's input is at fault for is not recovered from.
        """
        keeper = info.get("keeper")
        if not info.get("recovers") or not keeper:
            return False
        failures = read_failures(self.paths.failures, generation)
        if failures and failures[0].kind == "input":
            return False
        return keeper["host"] != self._host or process_alive(keeper["pid"], keeper["started"])

    def _lab_ended(self, info: dict[str, Any]) -> bool:
        """Whether the run was a lab's (`run.json`: lab {"root", "host"}, keeper) that is gone from this host."""
        keeper, lab = info.get("keeper"), info.get("lab")
        if keeper and keeper["host"] == self._host:
            return not process_alive(keeper["pid"], keeper["started"])
        return lab is not None and lab["host"] == self._host and not Path(lab["root"]).is_dir()

    def _rank(self, beacon: BeaconState, info: dict[str, Any], state: str) -> dict[str, Any]:
        here = beacon.host == self._host
        engines = info.get("engines", [])
        return {
            "rank": beacon.rank,
            "role": beacon.role,
            "engine": engines[beacon.rank] if beacon.rank < len(engines) else None,
            "pid": beacon.pid,
            "host": beacon.host,
            "alive": process_alive(beacon.pid, beacon.started) if here else (None if state in LIVE else False),
            "phase": beacon.phase,
            "step": beacon.step,
        }

    def _step(self, lineages: list[Event]) -> int:
        """The last finished step of the current lineage."""
        last = self.last_steps()
        return last.get(lineages[0]["id"], int(lineages[0]["parent_step"])) if lineages else last.get("", 0)

    @property
    def checkpoint_location(self) -> Location:
        """Where the run keeps its checkpoints."""
        return location_of(self.paths, self.plan.checkpoint.location if self.paths.plan.is_file() else "")

    def checkpoints(self) -> list[dict[str, Any]]:
        """Complete checkpoints by step, then time: {"name", "step", "lineage", "time", "loss", "world_size",
        "layout", "samples", "periodic", "reason", "bytes", "shared_bytes", "frozen", "origin", "path"}.

        `bytes` are its own, `shared_bytes` those of the modules `frozen` that it refers to, stored once for all;
        `layout` in words; `samples` consumed so far; `origin` the run and name that it was taken from ("" for the
        run's own). `periodic` ones may be removed, others are kept. CheckpointError when the location cannot be
        reached.
        """
        return [row for row, _ in self._checkpoints()]

    def _checkpoints(self) -> list[tuple[dict[str, Any], Found]]:
        return checkpoints.rows(self.id, self.checkpoint_location)

    def find_checkpoint(self, step: int | None = None, name: str = "") -> dict[str, Any]:
        """The checkpoint of that step or name (default: the newest, one of the current lineage if it has any).
        CheckpointError lists those there are.

        Several of one step: that of the current lineage or its nearest ancestor, else the newest.
        """
        return self.found_checkpoint(step, name)[0]

    def found_checkpoint(self, step: int | None = None, name: str = "") -> tuple[dict[str, Any], Found]:
        """The same, with its folder and manifest."""
        known = self._checkpoints()
        wanted = [(c, f) for c, f in known if (step is None or c["step"] == step) and (not name or c["name"] == name)]
        if not wanted:
            names = ", ".join(f"{c['name']} (step {c['step']})" for c, _ in known) or "none yet"
            what = name or ("any" if step is None else f"at step {step}")
            raise CheckpointError(f"run {self.id} has no checkpoint {what}; it has: {names}")
        if step is None:
            first = newest_first([f for _, f in wanted], self.rare_events())[0]
            return next((c, f) for c, f in wanted if f is first)
        ages = {lineage["id"]: age for age, lineage in enumerate(self.lineages())}
        return min(wanted, key=lambda pair: (ages.get(pair[0]["lineage"], len(ages)), -pair[0]["time"]))

    def traced_steps(self) -> list[int]:
        """Steps that all ranks traced, in the order of their traces."""
        return self._traces.steps(int(self.info.get("world_size", 0)))

    @property
    def traces_found(self) -> int:
        """How many records of traced steps were found so far, of all ranks."""
        return self._traces.found

    def traces(self, step: int | None = None) -> dict[int, dict[str, Any]]:
        """Measured ops of a step (default: the last one that all ranks traced), by rank: {"step", "t0", "ops"}."""
        steps = self.traced_steps()
        if not steps or (step is not None and step not in steps):
            return {}
        return self._traces.load(steps[-1] if step is None else step, int(self.info["world_size"]))

    def measured(self, step: int | None = None) -> MeasuredSchedule:
        """A step as measured (default: the last one that all ranks traced). MmlabError lists those there are."""
        if not (traces := self.traces(step)):
            steps = self.traced_steps()
            known = f"steps {', '.join(map(str, steps[-12:]))}" if steps else "none yet"
            every = f"tracking.trace_every is {self.plan.tracking.trace_every}"
            raise MmlabError(
                f"run {self.id} has no trace of {'a' if step is None else 'that'} step; it has {known}; {every}"
            )
        return MeasuredSchedule(self.plan, traces)

    def log(self, rank: int, lines: int | None = None) -> str:
        """What a rank printed (rotated files included), the last `lines` lines only if given."""
        path = self.paths.log(rank)
        parts = [path.with_name(f"{path.name}.{number}") for number in (2, 1)] + [path]
        text = ""
        for part in parts:
            with contextlib.suppress(FileNotFoundError):  # no such one, or it is being rotated just now
                text += part.read_text(errors="replace")
        return text if lines is None else "".join(text.splitlines(keepends=True)[-lines:])

    def follow_log(self, rank: int, poll: float = 0.2) -> Iterator[str]:
        """Lines of a rank's log as they are printed, from its current file's start, until the run has ended."""
        tail = LogTail(self.paths.log(rank), sys.maxsize, UPDATE)
        while True:
            ended = self.status()["state"] in ENDED
            yield from (f"{line}\n" for line in tail.read())
            if ended:
                if tail.begun:
                    yield tail.begun
                return
            time.sleep(poll)


def list_runs(root: str | Path | None = None) -> list[RunRecord]:
    """The runs under a folder (default MMLAB_RUNS, else ./runs), newest first."""
    folder = Path(root) if root is not None else runs_root()
    records = []
    for path in folder.glob("*/run.json"):
        with contextlib.suppress(MmlabError):  # it was deleted just now
            records.append(RunRecord(path.parent))
    return sorted(records, key=lambda record: record.info.get("created", 0.0), reverse=True)
