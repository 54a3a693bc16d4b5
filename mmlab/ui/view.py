"""The widget: panels drawn in a page by one shared script (`static/`), fed by messages.

Nothing of a run is a synced trait. The script is a model of its own, `Code`, one for each
kernel, so however many views a notebook shows, it is saved once (compressed); a view carries a loader.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import os
import re
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

import anywidget
import traitlets
from ipywidgets import Widget

from mmlab.messages.files import whole
from mmlab.ui.language import LANGUAGES, catalogue
from mmlab.ui.series import Series

Points = Mapping[str, Iterable[tuple[float, float]]]
"""New points by curve: (step, value)."""
XY = tuple["array[float]", "array[float]"]
"""Steps and values of one curve."""
SAME = 4
"""Entries that a list keeps at least when it is told by how it moved on."""
Frames = Mapping[str, Mapping[str, Any]]
"""What panels show (JSON), by panel and key."""


def script() -> str:
    """All of the page's code: the chart library, what panels share, the panels, what mounts them."""
    static = files("mmlab.ui") / "static"
    names = [static / "uplot.iife.min.js", static / "base.js", *_panels(".js"), static / "app.js"]
    catalogues = {language: catalogue(language) for language in LANGUAGES}
    words = f"const CATALOGUES = {json.dumps(catalogues, ensure_ascii=False, separators=(',', ':'))};"
    return _slim("\n".join([words, *(name.read_text(encoding="utf-8") for name in names)]))


def style() -> str:
    """All of the page's style."""
    static = files("mmlab.ui") / "static"
    names = [static / "uplot.min.css", static / "base.css", *_panels(".css")]
    return "\n".join(name.read_text(encoding="utf-8") for name in names)


def _panels(ending: str) -> list[Traversable]:
    found = (files("mmlab.ui") / "static" / "panels").iterdir()
    return sorted((path for path in found if path.name.endswith(ending)), key=lambda path: path.name)


class Code(Widget):
    """The shared script and style, as a model without a view."""

    packed = traitlets.Unicode().tag(sync=True)
    """Base64 of the gzipped script, which holds the style as `STYLE`: saved in each notebook, so it is small."""


@cache
def code() -> Code:
    """The one `Code` of this process."""
    text = f"{script()}\nconst STYLE = {json.dumps(style(), ensure_ascii=False)};\n"
    return Code(packed=base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode())


def _slim(script: str) -> str:
    """Without indentation and comments on lines of their own (licences, /*!, stay): 3.4 KB less in each notebook."""
    return re.sub(r"(?m)^/\*(?!!)[\s\S]*?\*/\n", "", re.sub(r"(?m)^[ \t]+", "", script))


class View(anywidget.AnyWidget):
    """Panels in a page. Messages to it:

    `{"kind": "history", "seq", "frames": {panel: frame}, "curves": [[name, points]]}`: all of it, for a new page or
    after a restore; `{"kind": "tick", ...}`: what changed since message seq - 1. Both carry two buffers a curve:
    float64 steps, float32 values. In a tick a curve that was sent before is named by its number, in the order in which
    names came since the history; and a list in a frame that has only moved on (a log) is told by `"moved": {panel:
    {key: [entries gone at the front, entries new at the end]}}`.
    `{"kind": "reply", "token", "value"}` (with buffers, where the answer has some) or `{..., "refusal"}` answers a
    request, `{"kind": "here"}` a sign of life.

    From it: `{"kind": "hello", "shown"}` (wants the history), `{"kind": "here", "shown"}` now and then and when other
    panels come into sight (`shown`: names of those in sight), `{"kind": "ask", "token", "panel", "verb", "args"}`.
    """

    _esm = (files("mmlab.ui") / "static" / "loader.js").read_text(encoding="utf-8")
    code = traitlets.Unicode().tag(sync=True)
    """The model id of the shared script."""
    layout_ = traitlets.Dict().tag(sync=True)
    """{"label", "arrangement": "board" | "stack", "panels": [name]}."""
    still = traitlets.Unicode().tag(sync=True)
    """HTML that a page shows while no kernel answers."""
    language = traitlets.Unicode().tag(sync=True)
    """The language of its texts (`MMLAB_LANGUAGE`, such as zh-CN); empty: that of the page, JupyterLab's own."""

    def __init__(self, panels: Iterable[str], label: str, arrangement: str = "stack") -> None:
        described = {"label": label, "arrangement": arrangement, "panels": list(panels)}
        language = os.environ.get("MMLAB_LANGUAGE", "")
        super().__init__(code=code().model_id or "", layout_=described, language=language)
        self._seq = 0
        self._frames: dict[str, dict[str, Any]] = {}
        self._names: dict[str, int] = {}

    def send(self, content: Any, buffers: Any = None) -> None:
        """Send a message to all pages; halves of surrogate pairs, which no message carries, are replaced."""
        super().send(whole(content), buffers)

    def send_history(self, frames: Frames, curves: Mapping[str, Series]) -> None:
        """Send everything: whole frames and all curves, decimated."""
        for name, frame in frames.items():
            self._frames[name] = dict(frame)
        self._names = {}
        self._post("history", self._frames, {name: series.points() for name, series in curves.items()})

    def send_tick(self, frames: Frames, points: Points) -> bool:
        """Send what differs from the last message; nothing when nothing does."""
        changed: dict[str, dict[str, Any]] = {}
        moved: dict[str, dict[str, Any]] = {}
        for name, frame in frames.items():
            before = self._frames.setdefault(name, {})
            for key, value in frame.items():
                if key in before and before[key] == value:
                    continue
                move = _move(before.get(key), value)
                part = changed if move is None else moved
                part.setdefault(name, {})[key] = value if move is None else move
                before[key] = value
        curves = {}
        for name, some in points.items():
            x, y = array("d"), array("d")
            for point in some:
                x.append(point[0])
                y.append(point[1])
            if x:
                curves[name] = (x, y)
        if not changed and not moved and not curves:
            return False
        self._post("tick", changed, curves, moved)
        return True

    def answer(self) -> None:
        """Tell pages that the kernel is there."""
        self.send({"kind": "here"}, buffers=[])

    def reply(self, token: Any, value: Any, buffers: Sequence[bytes] = ()) -> None:
        """Answer a request."""
        self.send({"kind": "reply", "token": token, "value": value}, buffers=list(buffers))

    def refuse(self, token: Any, refusal: str) -> None:
        """Answer a request that cannot be carried out."""
        self.send({"kind": "reply", "token": token, "refusal": refusal}, buffers=[])

    def _post(self, kind: str, frames: Frames, curves: Mapping[str, XY], moved: Frames | None = None) -> None:
        self._seq += 1
        sizes, buffers = packed(curves)
        for size in sizes:
            name = size[0]
            if name in self._names:
                size[0] = self._names[name]
            else:
                self._names[name] = len(self._names)
        content = {"kind": kind, "seq": self._seq, "frames": frames, "curves": sizes}
        self.send(content | ({"moved": moved} if moved else {}), buffers=buffers)


def packed(curves: Mapping[str, XY]) -> tuple[list[list[Any]], list[bytes]]:
    """Curves for a page: [[name, points]], and two buffers for each (float64 steps, float32 values)."""
    buffers = []
    for x, y in curves.values():
        buffers += [x.tobytes(), array("f", map(_single, y)).tobytes()]
    return [[name, len(x)] for name, (x, _) in curves.items()], buffers


def _move(before: Any, after: Any) -> list[Any] | None:
    """How a list has moved on: [entries gone at the front, entries new at the end]; None where most of it differs."""
    if not isinstance(before, list) or not isinstance(after, list):
        return None
    for gone in range(len(before) - SAME + 1):
        kept = len(before) - gone
        if after[:kept] == before[gone:]:
            return [gone, after[kept:]]
    return None


def _single(value: float) -> float:
    """A value that fits single precision (larger ones are infinite there)."""
    return value if abs(value) < 3.4e38 or math.isnan(value) else math.copysign(math.inf, value)
