"""What a run's folder says so far, read a piece at a time: for dashboard, picture, report and progress bar.

Memory is bounded whatever the length of the run. A feed belongs to one thread.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mmlab.messages import ENDED, PHASES, Event, RunPaths, read_events
from mmlab.messages.checkpoints import chain
from mmlab.messages.events import last_events, last_of, last_steps, live_values, parse_event, read_lines
from mmlab.plan import Plan, set_live
from mmlab.tracking.bottleneck import SKIPPED
from mmlab.tracking.compression import CompressionTrail
from mmlab.tracking.record import RunRecord
from mmlab.ui.series import Series
from mmlab.ui.words import clock, event_text

READ_LIMIT = 256 * 1024
"""Bytes of the event log read at once: 5 ms of work."""
GONE = 3.0
"""Seconds for which a run's folder must be gone until it counts as deleted: network file systems lose one for a moment,
and a view that was told of an end stays closed."""
PIECE = 256 * 1024
"""Bytes of the log of which it is known, at least, which steps lie in them."""
STEP_CURVES = ("loss", "tokens_per_s", "images_per_s", "grad_norm_total", "data_wait")
"""Fields of `step` events that are curves."""
EVAL_CURVES = (("loss", "held_out"), ("loss_swapped", "swapped"))
"""Fields of `eval` events, and their curves."""
CURVES = (*STEP_CURVES, *(name for _, name in EVAL_CURVES))
"""Curves that a feed always keeps: those fields, then the two losses of `eval` events. Others come with the events:
`grad_norm.MODULE`, `lr.MODULE`, and `phase.PHASE` (milliseconds a step, mean of the ranks)."""
STEP_PHASES = [(index, f"phase.{name}") for index, name in enumerate(PHASES)
               if name not in ("start", "eval", "checkpoint", "control")]  # fmt: skip
"""Phases that a step is made of: index and curve."""
MARKED = ("command", "checkpoint", "restore", "relayout", "notice", "recovery")
"""Kinds of events that charts mark, beside failures."""
MOST_MARKS = 400
BETWEEN = {"eval": "evaluating", "checkpoint": "saving"}
"""What ranks do between steps, by phase of the beacon."""
WINDOW = 20
"""Steps over which phases are averaged."""
SHOWN = ("state", "lineage", "command", "checkpoint", "restore", "relayout", "notice", "recovery", "eval", "samples",
         "bad_image", "overflow", "warning")  # fmt: skip
"""Kinds of events listed for people (steps are curves)."""


def curve_points(event: Event) -> list[tuple[str, float]]:
    """What an event adds to curves: (curve, value)."""
    return list(zip(*curve_values(event), strict=True))


def curve_values(event: Event) -> tuple[list[str], list[float]]:
    """The curves that an event adds to, and what it adds to each."""
    if event.get("kind") == "eval":
        told = [(name, event[key]) for key, name in EVAL_CURVES if event.get(key) is not None]
        return [name for name, _ in told], [float(value) for _, value in told]
    if event.get("kind") != "step":
        return [], []
    names = [name for name in STEP_CURVES if event.get(name) is not None]
    values = [float(event[name]) for name in names]
    for name in ("grad_norm", "lr"):
        for module, value in (event.get(name) or {}).items():
            if value is not None:
                names.append(f"{name}.{module}")
                values.append(float(value))
    if phases := event.get("phases"):
        sums = list(map(sum, zip(*phases, strict=True)))
        for index, name in STEP_PHASES:
            if sums[index] > 0:
                names.append(name)
                values.append(1000 * sums[index] / len(phases))
    return names, values


def marked(event: Event) -> str:
    """What a chart marks an event as; empty where it does not."""
    kind = event.get("kind", "")
    if kind == "state" and event.get("state") == "failed":
        return "failure"
    if kind == "recovery":
        return "recovery" if event.get("done") else "failure"
    if kind == "command" and not event.get("ok"):
        return ""
    return kind if kind in MARKED else ""


class StepIndex:
    """Where in a log which steps lie, so that some of them are read without the rest."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, int, float, float]] = []

    def note(self, start: int, end: int, steps: Sequence[float]) -> None:
        """The steps of which a piece of the log has points. Small pieces grow together."""
        low, high = min(steps, default=math.inf), max(steps, default=-math.inf)
        if self._pieces and self._pieces[-1][1] - self._pieces[-1][0] < PIECE:
            first, _, before, after = self._pieces[-1]
            self._pieces[-1] = (first, end, min(low, before), max(high, after))
        else:
            self._pieces.append((start, end, low, high))

    def pieces(self, low: float, high: float) -> list[tuple[int, int]]:
        """(start, end) of those that hold steps from low to high."""
        return [(start, end) for start, end, first, last in list(self._pieces) if first <= high and last >= low]


class Feed:
    """The present picture of one run.

    `state`, `reason`, `step`, `steps` (planned), `curves` {name: Series}, `recent` (last events, oldest first), `ranks`
    as in `run.status()`, `rates` {module: base learning rate}, `last` (the last `step` event), `evals`, `samples`
    (the newest), `sampled` (all that are kept), `states` and `commands` (their events), `compression` (what gradients
    were coded with), `values` (live fields of the plan that commands have set), `marks` (what happened at which step:
    [step, "command" | "checkpoint" | "restore" | "relayout" | "notice" | "failure" | "recovery", words]).
    """

    def __init__(self, run_dir: Path | str, capacity: int = 4000) -> None:
        self.paths = RunPaths(Path(run_dir))
        self.record = RunRecord(self.paths.root)
        self._generation = self.record.info.get("generation", 0)
        self.state = "queued"
        self.reason = ""
        self.reading: float | None = None
        """The share of the log that has been read, while that takes several calls; else None."""
        self._said = (self.state, self.reason)
        self._gone: float | None = None
        self.step = 0
        self.steps = self.plan.train.steps
        self.rates = {name: getattr(self.plan.train, name).lr for name in ("vision", "projector", "language")}
        self._capacity = capacity
        self.curves = {name: Series(capacity) for name in CURVES}
        self.recent: deque[Event] = deque(maxlen=60)
        self.ranks: list[dict[str, Any]] = []
        self.last: Event = {}
        self.first_loss: float | None = None
        self.evals: deque[Event] = deque(maxlen=200)
        self.samples: Event = {}
        self.sampled: deque[Event] = deque(maxlen=200)
        self.compression = CompressionTrail()
        self.values: dict[str, Any] = {}
        self.states: list[Event] = []
        self.commands: deque[Event] = deque(maxlen=500)
        self.marks: deque[list[Any]] = deque(maxlen=MOST_MARKS)
        self.last_steps: deque[Event] = deque(maxlen=WINDOW + SKIPPED)
        """The last `step` events of the current lineage and layout."""
        self.moved = 0
        """The step after which the ranks got their present layout."""
        self.cuts = 0
        self._lineages: list[Event] = []
        self._index = StepIndex()
        self._names: list[str] = []
        self._steps: list[float] = []
        self._rows: list[list[float]] = []
        self._offset = 0

    @property
    def plan(self) -> Plan:
        """The run's plan; what is measured at its start is in it from then on."""
        return self.record.plan

    def live_plan(self) -> Plan:
        """The plan with what commands and restores have made of its live fields."""
        return set_live(self.plan, self.values) if self.values else self.plan

    def read(self, on_event: Callable[[Event], None] | None = None, seconds: float = math.inf) -> int:
        """Take in what is new in the event log; the number of events. `on_event` sees each.

        After about so many seconds it leaves the rest for another call: `reading` then says how much has been read.
        Meanwhile state and reason are already those of the log's end, all else is as it was there.
        """
        count, began, end = 0, self._offset, time.perf_counter() + seconds
        while True:
            if self._offset > began and time.perf_counter() > end and self.unread:
                self._stop_short()
                return count
            lines, after = read_lines(self.paths.events, self._offset, READ_LIMIT)
            if after == self._offset:
                if self.reading is not None:
                    self.reading, (self.state, self.reason) = None, self._said
                return count
            start, self._offset = self._offset, after
            steps = []
            for line in lines:  # each forgotten before the next one: a piece of events is larger than caches
                event = parse_event(line)
                if event is None:
                    continue
                count += 1
                self._take(event)
                if event["kind"] in ("step", "eval") and "step" in event:
                    steps.append(event["step"])
                if on_event is not None:
                    on_event(event)
            self._index.note(start, after, steps)
            self._draw()

    @property
    def unread(self) -> int:
        """Bytes of the event log that are still to be read."""
        with suppress(FileNotFoundError):
            return self.paths.events.stat().st_size - self._offset
        return 0

    def _stop_short(self) -> None:
        """Say how much has been read of a log that takes several calls, and what its end says of the state."""
        events = last_events(self.paths.events)
        if said := last_of(events, "state"):
            self.state, self.reason = said["state"], said.get("reason") or ""
        elif last_of(events, "step"):
            self.state, self.reason = "running", ""
        self.reading = self._offset / max(1, self._offset + self.unread)

    def look(self) -> None:
        """Ask the record for the state that beacons and processes tell (a dead rank writes no event). A run is deleted
        when its folder has been gone for some seconds; one that comes back is what its log said."""
        known = self._said if self.state == "deleted" else (self.state, self.reason)
        present = self.record.present(*known)
        if present["state"] != "deleted":
            self._gone = None
            if present["generation"] != self._generation:  # how it begins is read from the log first
                self._generation = present["generation"]
                return
        else:
            self._gone = time.monotonic() if self._gone is None else self._gone
            if time.monotonic() - self._gone < GONE:
                return
        self.state, self.reason, self.ranks = present["state"], present["reason"], present["ranks"]

    def near(self, names: Iterable[str], low: float, high: float) -> dict[str, Series] | None:
        """Curves between two steps; None where points were merged, so that `closer` has more of them."""
        series = {name: self.curves[name] for name in names if name in self.curves}
        if not all(one.whole for one in series.values()):
            return None
        return {name: one.between(low, high) for name, one in series.items()}

    def closer(self, names: Iterable[str], low: float, high: float) -> dict[str, Series]:
        """Curves between two steps, from the log. Takes up to a second for each 100,000 steps; any thread."""
        wanted = set(names)
        found = {name: Series(self._capacity) for name in wanted}
        last = last_steps(chain(list(self._lineages)))
        for start, end in self._index.pieces(low, high):
            for event in read_events(self.paths.events, start, end - start)[0]:
                step = event.get("step", -1)
                if low <= step <= high and step <= last.get(event["lineage"], -1):
                    for name, value in curve_points(event):
                        if name in wanted:
                            found[name].add(step, value)
        return found

    @property
    def doing(self) -> str:
        """The state, or what keeps a running run from its next step: "evaluating", "saving"."""
        phase = self.ranks[0]["phase"] if self.ranks else ""
        return BETWEEN.get(phase, self.state) if self.state == "running" else self.state

    @property
    def ended(self) -> bool:
        """Whether the run is over, and its log read."""
        return self.state in ENDED and self.reading is None

    def phases(self) -> list[list[float]]:
        """Seconds of each phase of `messages.PHASES` by rank, mean over the last steps of the present layout; empty
        without telemetry."""
        rows = [event["phases"] for event in self.last_steps if event.get("phases")][-WINDOW:]
        if not rows:
            return []
        ranks = len(rows[-1])
        rows = [row for row in rows if len(row) == ranks]
        return [
            [sum(row[rank][phase] for row in rows) / len(rows) for phase in range(len(PHASES))] for rank in range(ranks)
        ]

    def roles(self) -> list[str]:
        """The role of each rank, such as "vision 0" or "stage 1 tp 0"."""
        return [place.label for place in self.plan.layout().places]

    def _take(self, event: Event) -> None:
        kind = event.get("kind", "")
        self.compression.take(event)
        if kind == "step":
            self._take_step(event)
            return
        if kind == "state":
            self.state, self.reason = self._said = event["state"], event.get("reason") or ""
            self.states.append(event)
        elif kind == "lineage":
            self._take_lineage(event)
        elif kind == "eval":
            self._take_eval(event)
        elif kind == "samples":
            self.samples = event
            self.sampled.append(event)
        elif kind == "command":
            self.commands.append(event)
            if event["ok"] and event["verb"] == "set":
                self._take_values(event["args"].get("values", {}))
        elif kind == "relayout":
            self.moved = int(event["step"])
            self.last_steps.clear()
            self.steps = int(event.get("steps", self.steps))
            self.rates = {name: getattr(self.plan.train, name).lr for name in self.rates}
        elif kind == "restore":
            self._take_values(event["values"])
        self.values = live_values(self.values, event)
        if kind in SHOWN:
            self.recent.append(event)
        if mark := marked(event):
            self.marks.append([event.get("step", self.step), mark, f"{clock(event)}  {event_text(event)}"])

    def _take_step(self, event: Event) -> None:
        self.last = event
        self.last_steps.append(event)
        self.step = int(event.get("step", self.step))
        self._take_points(event)
        if self.first_loss is None:
            self.first_loss = event.get("loss")

    def _take_eval(self, event: Event) -> None:
        self.evals.append(event)
        self._take_points(event)

    def _take_points(self, event: Event) -> None:
        names, values = curve_values(event)
        if names != self._names:
            self._draw()
            self._names = names
        self._steps.append(event.get("step", self.step))
        self._rows.append(values)

    def _draw(self) -> None:
        """Put new points into their curves: column by column, which takes a fifth of the time."""
        for name, values in zip(self._names, zip(*self._rows, strict=True), strict=False):
            series = self.curves.get(name)
            if series is None:
                series = self.curves[name] = Series(self._capacity)
            series.extend(self._steps, values)
        self._steps, self._rows = [], []

    def _take_lineage(self, event: Event) -> None:
        self._lineages.append(event)
        if not event.get("parent"):
            return
        step = int(event.get("parent_step", 0))
        self._draw()
        for series in self.curves.values():
            series.cut(step)
        self.step = step
        self.cuts += 1
        self.last_steps.clear()

    def _take_values(self, values: dict[str, Any]) -> None:
        for key, value in values.items():
            parts = key.split(".")
            if key == "train.steps":
                self.steps = int(value)
            elif len(parts) == 3 and parts[0] == "train" and parts[2] == "lr" and parts[1] in self.rates:
                self.rates[parts[1]] = float(value)
