"""The charts of a run as an object of their own: what its page can choose, a cell can too."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from mmlab.ui.panels.charts import Charts
from mmlab.ui.part import Part


class ChartsPart(Part):
    """Charts of a run. Methods return the object, so that last in a cell it shows itself."""

    @property
    def _charts(self) -> Charts:
        return cast(Charts, self.panels["charts"])

    def show_only(self, *charts: str) -> ChartsPart:
        """Choose which charts are in sight: "loss", "throughput", "norms", "rates", "wait", "phases"."""
        self._charts.set(shown=charts)
        return self

    def scale(self, smoothing: float | None = None, log: bool | None = None) -> ChartsPart:
        """Smooth over so many percent of the steps in sight (0: not at all); logarithmic scales or linear ones."""
        self._charts.set(smoothing=smoothing, log=log)
        return self

    def overlay(self, *runs: Any) -> ChartsPart:
        """Draw these runs beside this one: runs, their folders or names; none: this one alone.

        MmlabError where one is no run, or for more than four.
        """
        from mmlab.lab import Run

        opened = [run if hasattr(run, "dir") else Run.open(run) for run in runs]
        self._charts.overlay(Path(run.dir) for run in opened)
        return self
