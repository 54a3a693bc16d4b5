"""Time per phase of each rank."""

from __future__ import annotations

from typing import Any

from mmlab.messages import PHASES
from mmlab.plan.tables import html_table, text_table
from mmlab.ui.panel import RunPanel
from mmlab.ui.source import RunSource

AT_ONCE = 6
"""Rows told anew in one frame, in turns: with 64 ranks all of them would be 3 KB a second."""


class Phases(RunPanel):
    """What each rank spends a step on, mean of the last steps."""

    name = "phases"
    title = "Time per phase"
    every = 1.0

    def __init__(self, source: RunSource) -> None:
        super().__init__(source)
        self._names: list[str] = []
        self._told: list[list[float]] = []
        self._next = 0

    def frame(self) -> dict[str, Any]:
        """Milliseconds by rank ("row 0", "row 1", ...) and used phase; none without telemetry."""
        now = self.now()
        rows = now["rows"]
        if len(rows) != len(self._told) or now["names"] != self._names:
            self._told, self._names = list(rows), now["names"]
        for rank in range(self._next, self._next + min(AT_ONCE, len(rows))):
            self._told[rank % len(rows)] = rows[rank % len(rows)]
        self._next = (self._next + AT_ONCE) % max(1, len(rows))
        told = {f"row {rank}": row for rank, row in enumerate(self._told)}
        return {"names": self._names, "roles": now["roles"], "ranks": len(rows)} | told

    def now(self) -> dict[str, Any]:
        """Used phases, roles, and milliseconds by rank and phase."""
        rows = self.feed.phases()
        used = [index for index in range(len(PHASES)) if any(row[index] > 0 for row in rows)]
        bars = [[round(1000 * row[index], 2) for index in used] for row in rows]
        names = [PHASES[index] for index in used]
        return {"names": names, "roles": self.feed.roles(), "rows": bars}

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        frame = self.now()
        rows = [
            [f"{rank} {role}", *(f"{value:.1f}" for value in row)]
            for rank, (role, row) in enumerate(zip(frame["roles"], frame["rows"], strict=False))
        ]
        return ["rank, ms a step", *frame["names"]], rows

    def text(self) -> str:
        """A table: ranks by phases."""
        header, rows = self._cells()
        return text_table(header, rows) if rows else "no times of phases yet"

    def html(self) -> str:
        """The table."""
        header, rows = self._cells()
        return html_table(header, rows) if rows else "<p>no times of phases yet</p>"
