"""What a run's ranks say to each other: groups, bytes a step as counted, time under way and time waited for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mmlab.messages import AXES
from mmlab.plan.layout import Layout
from mmlab.plan.schema import MODULES
from mmlab.tracking.tables import WINDOW, Table, milliseconds, size

PURPOSE = {
    "tp": "tensor parallel: partial results of the layers",
    "cp": "context parallel: keys, values and their gradients",
    "cp_skipped": "context parallel: not sent, since no query sees it",
    "pp": "activations between stages and their gradients",
    "tokens": "image tokens to the first stage and their gradients",
    "vision": "gradients of the encoder",
    "projector": "gradients of the projector",
    "language": "gradients of the language model",
    "sharding": "sharded parameters and their gradients",
    "embedding": "gradient of the table that first and last stage share",
}
"""What each axis of `mmlab.messages.AXES` is for, in words."""


@dataclass(frozen=True)
class AxisTraffic:
    """One axis of a run's communication, mean of its last steps."""

    axis: str
    groups: list[list[int]]
    """Ranks that talk to each other."""
    bytes: list[float]
    """Payload of each group, bytes a step: what its ranks send point to point or hand to collectives."""
    seconds: float | None
    """How long gradients were under way, seconds a step (on the rank where it was longest); None where not timed."""
    exposed: float | None
    """How long of it the rank waited."""


class TrafficTable(Table):
    """The communication of a run by axis; shows as a table. `rows` hold the numbers."""

    header = ("axis", "what for", "ranks", "a step", "under way", "waited")
    nothing = "nothing was counted: no step has ended yet, or tracking.telemetry is off"

    def __init__(self, layout: Layout, steps: Iterable[Mapping[str, Any]]) -> None:
        counted = [step for step in steps if "traffic" in step][-WINDOW:]
        self.steps = len(counted)
        self.rows = [self._row(layout, axis, counted) for axis in AXES if any(axis in s["traffic"] for s in counted)]

    @staticmethod
    def _row(layout: Layout, axis: str, steps: list[Mapping[str, Any]]) -> AxisTraffic:
        groups = layout.groups(axis)
        counts = [step["traffic"][axis] for step in steps if axis in step["traffic"]]
        means = [sum(count[i] for count in counts) / len(steps) for i in range(len(groups))]
        timed = [step["communication"][axis] for step in steps if axis in step.get("communication", {})]
        seconds = exposed = None
        if axis in MODULES and timed:
            seconds = sum(t["seconds"] for t in timed) / len(timed)
            exposed = sum(t["exposed"] for t in timed) / len(timed)
        return AxisTraffic(axis, groups, means, seconds, exposed)

    @property
    def cells(self) -> list[tuple[str, ...]]:
        """Axis, purpose, groups, bytes a step, under way, waited: as shown."""
        return [
            (
                row.axis,
                PURPOSE[row.axis],
                _groups(row.groups),
                size(sum(row.bytes)),
                milliseconds(row.seconds),
                milliseconds(row.exposed),
            )
            for row in self.rows
        ]


def _groups(groups: list[list[int]]) -> str:
    shown = " ".join("{" + ",".join(map(str, group)) + "}" for group in groups[:4])
    return shown + (f" and {len(groups) - 4} more" if len(groups) > 4 else "")
