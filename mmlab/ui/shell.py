"""Teaching an IPython shell to show runs. Light: dashboard and widgets load when a run is first shown."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmlab.messages import ENDED

if TYPE_CHECKING:
    from mmlab.ui.dashboard import Dashboard

RUN_CLASS = ("mmlab.lab", "Run")


class Faces:
    """Shows runs in one shell: one dashboard for each live run, however often it is displayed."""

    def __init__(self) -> None:
        self._dashboards: dict[Path, Dashboard] = {}

    def show(self, run: Any) -> None:
        """Display a run in the current cell: the dashboard of a live one, the picture of one that has ended."""
        from mmlab.ui.dashboard import Dashboard, publish
        from mmlab.ui.snapshot import snapshot

        path = Path(run.dir)
        known = self._dashboards.get(path)
        if known is None or known.over:
            if run.status()["state"] in ENDED:
                publish(*snapshot(run).bundle())
                return
            self._dashboards[path] = known = Dashboard(run, path)
        known.show()


def install(shell: Any) -> None:
    """Make a shell show a `mmlab.lab.Run` that is a cell's last expression as its dashboard. Once for each shell."""
    formatter = shell.display_formatter.ipython_display_formatter
    known = {(cls.__module__, cls.__name__) for cls in formatter.type_printers}
    if RUN_CLASS not in known and RUN_CLASS not in formatter.deferred_printers:
        formatter.for_type_by_name(*RUN_CLASS, Faces().show)
