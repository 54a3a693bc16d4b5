"""Time per phase of each rank."""

from __future__ import annotations

from typing import Any

from mmlab.messages import PHASES
from mmlab.plan.tables import html_table, text_table
from mmlab.ui.panel import RunPanel


class Phases(RunPanel):
    """What each rank spends a step on, mean of the last steps."""

    name = "phases"
    title = "Time per phase"
    every = 1.0

    def frame(self) -> dict[str, Any]:
        """Milliseconds by rank and used phase; empty without telemetry."""
        rows = self.feed.phases()
        used = [index for index in range(len(PHASES)) if any(row[index] > 0 for row in rows)]
        bars = [[round(1000 * row[index], 2) for index in used] for row in rows]
        names = [PHASES[index] for index in used]
        return {"names": names, "roles": self.feed.roles(), "rows": bars}

    def _cells(self) -> tuple[list[str], list[list[str]]]:
        frame = self.frame()
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
