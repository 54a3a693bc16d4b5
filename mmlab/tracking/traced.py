"""Traced steps of a run: when each op ran on each rank, beside when the schedule would have had it run."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from mmlab.errors import MmlabError
from mmlab.plan import Plan
from mmlab.plan.bubbles import idle_shares
from mmlab.plan.ops import COMPUTE, Timeline
from mmlab.plan.picture import schedule_svg, schedule_text
from mmlab.plan.schedule import bubble, measured_timeline, row_labels, rows_to_draw

MOST = 16 * 1024 * 1024
"""Bytes at the end of each rank's traces that are looked at first; what comes later is all read."""
_STEP = re.compile(rb'\{"step":\s*(\d+)')


class Traces:
    """The traces in a run's folder: where each step's record lies, found once and then only for what was appended."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.found = 0
        """Records found so far: a run that went back traces steps anew."""
        self._read: dict[int, int] = {}
        self._where: dict[int, dict[int, tuple[int, int]]] = defaultdict(dict)

    def steps(self, world_size: int) -> list[int]:
        """Steps that all of so many ranks traced, in the order of their traces."""
        for rank in range(world_size):
            self._look(rank)
        found = [self._where[rank] for rank in range(world_size)]
        whole = set.intersection(*(set(steps) for steps in found)) if found else set()
        return sorted(whole, key=lambda step: found[0][step])

    def load(self, step: int, world_size: int) -> dict[int, dict[str, Any]]:
        """The records of a step by rank; KeyError where not all ranks have one."""
        records = {}
        for rank in range(world_size):
            offset, length = self._where[rank][step]
            with open(self._path(rank), "rb") as file:
                file.seek(offset)
                records[rank] = json.loads(file.read(length))
        return records

    def _path(self, rank: int) -> Path:
        return self._folder / f"rank-{rank}.jsonl"

    def _look(self, rank: int) -> None:
        try:
            with open(self._path(rank), "rb") as file:
                size = file.seek(0, 2)
                if size < self._read.get(rank, 0):  # begun anew
                    self._read.pop(rank)
                    self._where.pop(rank, None)
                offset = self._read.setdefault(rank, max(0, size - MOST))
                file.seek(offset)
                data = file.read()
        except FileNotFoundError:
            return
        for line in data[: data.rfind(b"\n") + 1].splitlines(keepends=True):
            if found := _STEP.match(line):
                self._where[rank][int(found[1])] = (offset, len(line))
                self.found += 1
            offset += len(line)
        self._read[rank] = offset


class MeasuredSchedule:
    """A step as measured. Shows as a picture and as text, as `plan.schedule()` shows it as planned.

    `timeline` holds each rank's ops with start and end in seconds; a receive's time is mostly waiting.
    """

    def __init__(self, plan: Plan, traces: Mapping[int, Mapping[str, Any]]) -> None:
        if len(traces) != plan.world_size:
            raise MmlabError(f"{len(traces)} of {plan.world_size} ranks have a trace")
        self.plan = plan
        self.step = int(traces[0]["step"])
        self.timeline = measured_timeline([traces[rank] for rank in range(plan.world_size)])

    @property
    def seconds(self) -> float:
        """From the first op's start to the last one's end."""
        times = [(t.start, t.end) for ops in self.timeline for t in ops]
        return max((end for _, end in times), default=0.0) - min((start for start, _ in times), default=0.0)

    def bubble(self) -> float:
        """Share (0 to 1) of the stages' time in which they did not compute."""
        return bubble(self.timeline)

    def idle(self) -> list[float]:
        """The same for each rank."""
        return idle_shares(self.timeline)

    @cached_property
    def costs(self) -> dict[tuple[int, str, int], float]:
        """Mean seconds of an op by (rank, kind, chunk), as `plan.schedule().simulate` takes them. Receives take none,
        since what they measure is waiting; a reduction takes what it took the rank that came last."""
        found: dict[tuple[int, str, int], list[float]] = defaultdict(list)
        for rank, ops in enumerate(self.timeline):
            for op, start, end in ops:
                if not op.kind.startswith("recv"):
                    found[rank, op.kind, op.chunk].append(end - start)
        means = {key: sum(values) / len(values) for key, values in found.items()}
        places = self.plan.layout().places
        together = (
            ("reduce", ("vision",)),
            ("reduce", ("language",)),
            ("reduce_embedding", ("language",)),
            ("norm", ("vision", "language")),
        )
        for kind, roles in together:
            keys = [key for key in means if key[1] == kind and places[key[0]].role in roles]
            means |= dict.fromkeys(keys, min((means[key] for key in keys), default=0.0))
        return means

    def planned(self) -> Timeline:
        """The step as planned, in seconds, with the measured mean time of each rank's kinds of ops: what differs from
        the measured one is waiting, and times that were not alike."""
        return self.plan.schedule().simulate(self.costs)

    def scale(self, planned: Timeline) -> float:
        """Seconds for a unit of a planned timeline, so that both have the same time of compute in all."""
        totals = [sum(t.end - t.start for ops in line for t in ops if t.op.kind in COMPUTE)
                  for line in (self.timeline, planned)]  # fmt: skip
        return totals[0] / totals[1] if totals[1] else 1.0

    @property
    def title(self) -> str:
        """Plan and step."""
        return f"{self.plan.name}: step {self.step}, as measured"

    def _drawn(self) -> tuple[Timeline, list[str]]:
        layout = self.plan.layout()
        rows = rows_to_draw(layout)
        return [self.timeline[rank] for rank in rows], row_labels(layout, rows)

    def svg(self) -> str:
        """The picture."""
        timeline, labels = self._drawn()
        return schedule_svg(timeline, self.title, labels, unit="s")

    def __str__(self) -> str:
        return f"{self.title}\n{schedule_text(*self._drawn())}"

    def __repr__(self) -> str:
        return str(self)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        svg = self.svg()
        return {"text/plain": str(self), "text/html": svg, "image/svg+xml": svg}
