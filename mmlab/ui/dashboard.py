"""The dashboard of a run, and the table of all parts that stand alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mmlab.ui.charting import ChartsPart
from mmlab.ui.panel import Panel
from mmlab.ui.panels.charts import Charts
from mmlab.ui.panels.checkpoints import Checkpoints
from mmlab.ui.panels.compression import Compression
from mmlab.ui.panels.controls import Controls
from mmlab.ui.panels.events import Events
from mmlab.ui.panels.head import Head
from mmlab.ui.panels.log import Log
from mmlab.ui.panels.phases import Phases
from mmlab.ui.panels.placement import PlacementPanel
from mmlab.ui.panels.samples import Samples
from mmlab.ui.panels.schedule import SchedulePanel
from mmlab.ui.part import PERIOD, Part
from mmlab.ui.snapshot import Snapshot, of_feed
from mmlab.ui.source import RunSource

Make = Callable[[RunSource], Panel]

PARTS: Mapping[str, tuple[str, tuple[Make, ...]]] = {
    "charts": ("Charts of a run", (Charts,)),
    "controls": ("Steer a run", (Head, Controls)),
    "compression_view": ("Compression of a run's gradients", (Compression,)),
    "samples_view": ("Samples of a run", (Samples,)),
    "log_view": ("Log of a run", (Log,)),
    "schedule_view": ("Pipeline schedule of a run", (SchedulePanel,)),
    "placement_view": ("Placement of a run", (PlacementPanel,)),
    "checkpoint_view": ("Checkpoints of a run", (Checkpoints,)),
}
"""Parts of the dashboard that stand alone, by the attribute of `mmlab.lab.Run`: label, panels."""
OVERVIEW: tuple[Make, ...] = (Head, Controls, Charts, Phases, Events)
"""What the dashboard shows at once; in sight when it opens."""
TABS: tuple[Make, ...] = (SchedulePanel, PlacementPanel, Checkpoints, Compression, Samples, Log)
"""What it shows when asked."""


def part(source: RunSource, name: str) -> Part:
    """A part of the dashboard that stands alone: a name of PARTS."""
    label, panels = PARTS[name]
    kind = ChartsPart if name == "charts" else Part
    return kind(source, [panel(source) for panel in panels], label)


class Dashboard(Part):
    """The live view of one run: everything. Its still picture is a PNG, which GitHub and exports show too."""

    source: RunSource
    lasting = False

    def __init__(self, run: Any, run_dir: Path | str, period: float = PERIOD, source: RunSource | None = None) -> None:
        source = source or RunSource(run, run_dir)
        overview = [make(source) for make in OVERVIEW]
        in_sight = [panel.name for panel in overview]
        panels = [*overview, *(make(source) for make in TABS)]
        super().__init__(source, panels, "Dashboard of a run", "board", in_sight, period)

    def snapshot(self) -> Snapshot:
        """The picture of the run as this dashboard knows it."""
        with self.source.lock:
            return of_feed(self.source.feed)

    def still(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The picture, and the run in a few lines."""
        return self.snapshot().bundle()
