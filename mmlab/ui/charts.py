"""The live board: one widget that draws a whole dashboard (uPlot, in `static/board.js`).

Nothing of a run is a synced trait, so a saved notebook holds the script once and no
data. Curves and state go as custom messages with binary buffers, and only what changed.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from importlib.resources import files
from typing import Any

import anywidget

from mmlab.ui.series import Series

Points = Mapping[str, Iterable[tuple[float, float]]]
"""New points by curve: (step, value)."""


def _static(*names: str) -> str:
    folder = files("mmlab.ui") / "static"
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


class Board(anywidget.AnyWidget):
    """The widget. Messages to its views:

    `{"kind": "history", "seq", "frame", "curves": [[name, points]]}`: all of it, for a new view or after a restore;
    `{"kind": "tick", "seq", "frame", "curves"}`: what changed since message seq - 1. Both carry two buffers a curve:
    float64 steps, float32 values. Views send `{"kind": "hello"}` (wants the history), `{"kind": "here"}` now and
    then, and `{"kind": "command", "token", "verb", "args"}`.
    """

    _esm = _static("uplot.iife.min.js", "board.js")
    _css = _static("uplot.min.css", "board.css")

    def __init__(self) -> None:
        super().__init__()
        self._seq = 0
        self._frame: dict[str, Any] = {}

    def send_history(self, frame: dict[str, Any], curves: Mapping[str, Series]) -> None:
        """Send everything: the whole frame and all curves, decimated."""
        self._frame = dict(frame)
        self._post("history", frame, {name: series.points() for name, series in curves.items()})

    def send_tick(self, frame: dict[str, Any], points: Points) -> bool:
        """Send what differs from the last message; nothing when nothing does."""
        changed = {key: value for key, value in frame.items() if self._frame.get(key) != value}
        curves = {}
        for name, new in points.items():
            x, y = array("d"), array("d")
            for point in new:
                x.append(point[0])
                y.append(point[1])
            if x:
                curves[name] = (x, y)
        if not changed and not curves:
            return False
        self._frame |= changed
        self._post("tick", changed, curves)
        return True

    def _post(self, kind: str, frame: dict[str, Any], curves: Mapping[str, tuple[array[float], array[float]]]) -> None:
        self._seq += 1
        buffers = []
        for x, y in curves.values():
            buffers += [x.tobytes(), array("f", map(_single, y)).tobytes()]
        sizes = [[name, len(x)] for name, (x, _) in curves.items()]
        self.send({"kind": kind, "seq": self._seq, "frame": frame, "curves": sizes}, buffers=buffers)


def _single(value: float) -> float:
    """A value that fits single precision (larger ones are infinite there)."""
    return value if abs(value) < 3.4e38 or math.isnan(value) else math.copysign(math.inf, value)
