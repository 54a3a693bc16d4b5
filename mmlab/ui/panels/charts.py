"""Curves of a run: loss and throughput by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmlab.messages import Event
from mmlab.ui.feed import CURVES
from mmlab.ui.panel import RunPanel
from mmlab.ui.series import CAPACITY, Series
from mmlab.ui.snapshot import spark
from mmlab.ui.source import RunSource
from mmlab.ui.view import Points
from mmlab.ui.words import number


class Charts(RunPanel):
    """Loss and throughput by step."""

    name = "charts"
    title = "Charts"

    def __init__(self, source: RunSource) -> None:
        super().__init__(source)
        self._points: dict[str, list[tuple[float, float]]] = {name: [] for name in CURVES}
        self._many = False
        source.listen(self._collect)

    def frame(self) -> dict[str, Any]:
        """Nothing beside the curves."""
        return {}

    def curves(self) -> Mapping[str, Series]:
        """Those of the feed."""
        self._drain()
        return self.feed.curves

    def points(self) -> Points | None:
        """Steps and evaluations that came since."""
        many, found = self._many, self._drain()
        return None if many else found

    def _drain(self) -> dict[str, list[tuple[float, float]]]:
        found, self._points = self._points, {name: [] for name in CURVES}
        self._many = False
        return found

    def _collect(self, event: Event) -> None:
        """Note new points; a page that is far behind gets the history instead."""
        if event.get("kind") not in ("step", "eval"):
            return
        names = {"loss": "held_out", "loss_swapped": "swapped"} if event["kind"] == "eval" else {n: n for n in CURVES}
        for field, name in names.items():
            if event.get(field) is not None:
                self._points[name].append((float(event["step"]), float(event[field])))
        if len(self._points["loss"]) > CAPACITY:
            self._drain()
            self._many = True

    def text(self) -> str:
        """The loss in block characters."""
        values = list(self.feed.curves["loss"].points()[1])
        return f"loss {spark(values)} {number(values[-1] if values else None, 4)}"

    def close(self) -> None:
        """Listen no longer."""
        self.source.unlisten(self._collect)
