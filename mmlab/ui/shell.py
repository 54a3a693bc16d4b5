"""The faces of runs in one process: which views there are, and a shell that shows a run as its dashboard.

Light: dashboard and widgets load when something is first shown.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmlab.messages import ENDED

if TYPE_CHECKING:
    from mmlab.ui.part import Part
    from mmlab.ui.source import RunSource

RUN_CLASS = ("mmlab.lab", "Run")


class Faces:
    """Shows runs: one view of each kind for each run, however often it is displayed."""

    def __init__(self) -> None:
        self._sources: dict[Path, RunSource] = {}
        self._parts: dict[tuple[Path, str], Part] = {}

    def show(self, run: Any) -> None:
        """Display a run in the current cell: the dashboard of a live one, the picture of one that has ended."""
        from mmlab.ui.dashboard import Dashboard
        from mmlab.ui.part import publish
        from mmlab.ui.snapshot import snapshot

        key = (Path(run.dir), "dashboard")
        known = self._parts.get(key)
        if known is None or known.over:
            status = run.status()
            if status["state"] == "deleted":  # there is no other picture than the one in memory
                publish(*(known.still() if known else ({"text/plain": f"{run!r}: {status['reason']}"}, {})))
                return
            if status["state"] in ENDED:
                publish(*snapshot(run).bundle())
                return
            self._parts[key] = known = Dashboard(run, run.dir, source=self._source(run))
        known.show()

    def part(self, run: Any, name: str) -> Part:
        """A part of a run's dashboard that stands alone (a name of `dashboard.PARTS`)."""
        from mmlab.ui.dashboard import part

        key = (Path(run.dir), name)
        if key not in self._parts or self._parts[key].over:
            self._parts[key] = part(self._source(run), name)
        return self._parts[key]

    def lab_part(self, lab: Any) -> Part:
        """The view of a lab."""
        from mmlab.ui.lab_source import LabSource
        from mmlab.ui.panels.cluster import Cluster
        from mmlab.ui.part import Part

        key = (Path("labs", lab.id), "cluster_view")
        if key not in self._parts or self._parts[key].over:
            source = LabSource(lab)
            self._parts[key] = Part(source, [Cluster(source)], "Engines and runs of a lab")
        return self._parts[key]

    def _source(self, run: Any) -> RunSource:
        from mmlab.ui.source import RunSource

        path = Path(run.dir)
        if path not in self._sources:
            self._sources[path] = RunSource(run, path)
        return self._sources[path]


@cache
def faces() -> Faces:
    """Those of this process."""
    return Faces()


def install(shell: Any) -> None:
    """Make a shell show a `mmlab.lab.Run` that is a cell's last expression as its dashboard. Once for each shell."""
    formatter = shell.display_formatter.ipython_display_formatter
    known = {(cls.__module__, cls.__name__) for cls in formatter.type_printers}
    if RUN_CLASS not in known and RUN_CLASS not in formatter.deferred_printers:
        formatter.for_type_by_name(*RUN_CLASS, faces().show)
