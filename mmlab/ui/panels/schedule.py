"""The pipeline schedule: as planned, and as measured in a traced step."""

from __future__ import annotations

from typing import Any

from mmlab.plan import Plan
from mmlab.plan.ops import Timeline
from mmlab.tracking.traced import MeasuredSchedule
from mmlab.ui import lanes
from mmlab.ui.panel import Panel, RunPanel
from mmlab.ui.source import RunSource

OFFERED = 500
"""Newest traced steps to choose from."""


class PlannedPanel(Panel):
    """The schedule of a plan."""

    name = "schedule"
    title = "Pipeline schedule"
    every = 60.0
    lasting = True

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._frame: dict[str, Any] = {}

    def frame(self) -> dict[str, Any]:
        """Lanes of ops as planned; never changes."""
        self._frame = self._frame or lanes.planned(self.plan)
        return self._frame

    def text(self) -> str:
        """The picture in characters, and the bubbles."""
        return f"{self.plan.schedule()}\n\n{lanes.bubble_text(self.plan, None)}"

    def html(self) -> str:
        """The picture, and the bubbles."""
        return f"<div>{self.plan.schedule().svg()}{lanes.bubble_html(self.plan, None)}</div>"


class SchedulePanel(RunPanel):
    """The schedule of a run: planned and measured on one axis. Requests: `step` (one traced step)."""

    name = "schedule"
    title = "Pipeline schedule"
    every = 2.0
    slow = frozenset({"step"})

    def __init__(self, source: RunSource) -> None:
        super().__init__(source)
        self._plan: Plan | None = None
        self._planned: dict[str, Any] = {}
        self._estimated: Timeline = []
        self._measured: dict[str, Any] | None = None
        self._found_then = 0

    def _prepare(self) -> None:
        """What follows from the plan, once for each (a relayout makes another)."""
        plan = self.feed.plan
        if plan is not self._plan:
            self._plan, self._measured = plan, None
            self._planned, self._estimated = lanes.planned(plan), plan.schedule().simulate()

    def frame(self) -> dict[str, Any]:
        """Lanes as planned, and as measured in the newest traced step."""
        self._prepare()
        steps = self._steps()
        if not steps:
            self._measured = None
        elif self._measured is None or self._found_then != self.feed.record.traces_found:
            self._found_then = self.feed.record.traces_found  # not by the step: one may be traced again
            self._measured = self._of(steps[-1])
        every = self.feed.plan.tracking.trace_every
        return {**self._planned, "every": every, "steps": sorted(steps[-OFFERED:]), "measured": self._measured}

    def _steps(self) -> list[int]:
        """Traced steps of this layout."""
        return [step for step in self.feed.record.traced_steps() if step > self.feed.moved]

    def _of(self, step: int | None) -> dict[str, Any]:
        return lanes.measured(self.feed.record.measured(step), self._estimated)

    def handle(self, verb: str, args: dict[str, Any]) -> Any:
        """`step`: another traced step as measured."""
        if verb != "step":
            raise ValueError(f"unknown request {verb!r}")
        with self.source.lock:
            self._prepare()
            return self._of(int(args["step"]))

    def _found(self) -> MeasuredSchedule | None:
        steps = self._steps()
        return self.feed.record.measured(steps[-1]) if steps else None

    def text(self) -> str:
        """Both pictures in characters, and the bubbles."""
        found = self._found()
        parts = [str(self.feed.plan.schedule()), str(found) if found else self._untraced()]
        return "\n\n".join([*parts, lanes.bubble_text(self.feed.plan, found)])

    def html(self) -> str:
        """Both pictures, and the bubbles."""
        found = self._found()
        below = found.svg() if found else f"<p>{self._untraced()}</p>"
        return f"<div>{self.feed.plan.schedule().svg()}{below}{lanes.bubble_html(self.feed.plan, found)}</div>"

    def _untraced(self) -> str:
        every = self.feed.plan.tracking.trace_every
        return "no step was traced yet" if every else "no step is traced: tracking.trace_every is 0"
