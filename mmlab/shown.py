"""What a run shows of itself: views in a notebook, text in a terminal.

One exception to the layers: views lie above, in `mmlab.ui`, which is loaded by name when one is first asked for.
Static imports still point down only.
"""

from __future__ import annotations

import importlib
from typing import Any

from mmlab.tracking.placement import Placement
from mmlab.tracking.record import RunRecord
from mmlab.tracking.traced import MeasuredSchedule


class Shown:
    """The views of a run. Last in a cell they are live, elsewhere they print as text."""

    _record: RunRecord

    def _part(self, name: str) -> Any:
        return importlib.import_module("mmlab.ui.shell").faces().part(self, name)

    def measured(self, step: int | None = None) -> MeasuredSchedule:
        """A traced step as measured (default: the last one that all ranks traced), beside `plan.schedule()`: its
        timeline, bubble and picture. MmlabError lists the steps there are."""
        return self._record.measured(step)

    def placement(self) -> Placement:
        """Which rank is where and how it is (alive, waiting, slow, stopped, dead), what it does, and which groups talk
        to each other with how many bytes a step; a table."""
        return self._record.placement()

    def snapshot(self) -> Any:
        """A still picture of the run: shows as an image in a notebook, as text elsewhere."""
        return importlib.import_module("mmlab.ui.snapshot").snapshot(self)

    @property
    def charts(self) -> Any:
        """Curves by step: loss, throughput, gradient norms, learning rates, data wait, phases; other runs overlaid with
        `run.charts.overlay(other)`."""
        return self._part("charts")

    @property
    def controls(self) -> Any:
        """Buttons that steer the run, and what all ranks acked."""
        return self._part("controls")

    @property
    def compression_view(self) -> Any:
        """How gradients are compressed, by group: choice and parameters, bytes, time and error beside the loss."""
        return self._part("compression_view")

    @property
    def samples_view(self) -> Any:
        """Held-out pictures with what the model writes for them, and the truth."""
        return self._part("samples_view")

    @property
    def log_view(self) -> Any:
        """What ranks print: all or one, filtered and followed."""
        return self._part("log_view")

    @property
    def checkpoint_view(self) -> Any:
        """What was saved, branch by branch: compare, restore, branch, name, delete."""
        return self._part("checkpoint_view")

    @property
    def schedule_view(self) -> Any:
        """The pipeline schedule as planned and as measured, step by step; plays."""
        return self._part("schedule_view")

    @property
    def placement_view(self) -> Any:
        """Hosts, ranks and the groups among them; what is dead, slow or waiting stands out."""
        return self._part("placement_view")


class ShownLab:
    """The views of a lab."""

    @property
    def cluster_view(self) -> Any:
        """State, engines with the ranks on them, and runs of the lab; closes it."""
        return importlib.import_module("mmlab.ui.shell").faces().lab_part(self)
