"""The dashboard as a still picture (PNG, by Pillow): what a saved notebook, GitHub or an export shows of a run."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageOps

from mmlab.messages import PHASES
from mmlab.ui import fonts
from mmlab.ui.feed import Feed
from mmlab.ui.scales import nice_ticks, smooth, span
from mmlab.ui.words import duration, number, plan_text

WIDTH = 900
"""Width of the picture in CSS pixels."""
SCALE = 2
"""Device pixels for each CSS pixel."""
_FINE = 2  # drawn larger by this factor and scaled down: Pillow draws lines without antialiasing
_CORNER = 8  # radius
COLOURS = 128
"""Colours of the picture; the last is what shines through."""
MOST_ROWS = 12
"""Ranks whose phases are drawn."""

INK, SOFT, LINE, RAISED, WHITE = "#1d2430", "#5b6472", "#d5dae1", "#f4f5f7", "#ffffff"
BLUE, PALE, ORANGE, GREEN, RED, GREY = "#2563c9", "#f0b95c", "#c2570c", "#1d7f4a", "#c0262d", "#667085"
STATE_COLOURS = {"running": BLUE, "paused": ORANGE, "finished": GREEN, "failed": RED}
PHASE_COLOURS = {
    "data": "#8a8f1a", "encode": "#7a3fc4", "forward": "#2f6fd6", "backward": "#17408f", "exchange": "#e58a1f",
    "pipeline": "#f0b95c", "reduce": "#cf4a26", "optimizer": "#1f8a86", "idle": "#cfd4dc",
}  # fmt: skip
"""Compute in blues and violet, communication in oranges, data in olive; the same as in `static/board.css`."""
OTHER = "#8e97a5"
BOX_WIDTH = 0.75
"""Width over height of the box that stands for a character without a font."""
SAMPLES = 6
"""Held-out pictures shown."""


class _Canvas:
    """Drawing in CSS pixels."""

    def __init__(self, width: int, height: int) -> None:
        self.size = (width * SCALE, height * SCALE)
        self.unit = SCALE * _FINE
        self.image = Image.new("RGB", (width * self.unit, height * self.unit), WHITE)
        self.draw = ImageDraw.Draw(self.image)

    def box(self, x: float, y: float, w: float, h: float, fill: str, radius: float = 0) -> None:
        corners = (x * self.unit, y * self.unit, (x + w) * self.unit - 1, (y + h) * self.unit - 1)
        if corners[2] >= corners[0] and corners[3] >= corners[1]:
            self.draw.rounded_rectangle(corners, radius * self.unit, fill=fill)

    def line(self, points: Sequence[tuple[float, float]], colour: str, width: float = 1) -> None:
        scaled = [(x * self.unit, y * self.unit) for x, y in points]
        if len(scaled) > 1:
            self.draw.line(scaled, fill=colour, width=max(1, round(width * self.unit)), joint="curve")

    def dot(self, x: float, y: float, colour: str, radius: float = 3.5) -> None:
        unit = self.unit
        corners = ((x - radius) * unit, (y - radius) * unit, (x + radius) * unit, (y + radius) * unit)
        self.draw.ellipse(corners, fill=colour, outline=WHITE, width=unit // 2)

    def text(self, x: float, y: float, text: str, size: float = 12, colour: str = INK, anchor: str = "ls") -> None:
        pieces = list(fonts.pieces(text))
        widths = [self._length(path, piece, size) for path, piece in pieces]
        left = x * self.unit - {"l": 0.0, "m": 0.5, "r": 1.0}[anchor[0]] * sum(widths)
        for (path, piece), width in zip(pieces, widths, strict=True):
            if piece.startswith(fonts.BOX):
                self._boxes(left, y * self.unit, size * self.unit, len(piece), colour)
            else:
                font = fonts.font(path, size * self.unit)
                self.draw.text((left, y * self.unit), piece, fill=colour, font=font, anchor="ls")
            left += width

    def _boxes(self, left: float, base: float, size: float, count: int, colour: str) -> None:
        """Boxes for characters that no font has."""
        for index in range(count):
            x = left + (index + 0.1) * BOX_WIDTH * size
            corners = (x, base - 0.7 * size, x + 0.8 * BOX_WIDTH * size, base)
            self.draw.rectangle(corners, outline=colour, width=max(1, round(size / 16)))

    def _length(self, path: str, piece: str, size: float) -> float:
        if piece.startswith(fonts.BOX):
            return len(piece) * BOX_WIDTH * size * self.unit
        return fonts.font(path, size * self.unit).getlength(piece)

    def width(self, text: str, size: float) -> float:
        return sum(self._length(path, piece, size) for path, piece in fonts.pieces(text)) / self.unit

    def fit(self, text: str, size: float, room: float) -> str:
        """The text, cut with an ellipsis where it needs more room."""
        while text and self.width(text, size) > room:
            text = text[:-2].rstrip() + "…" if len(text) > 2 else ""
        return text

    def png(self) -> bytes:
        """As a card with round corners, on whatever a theme has behind it.

        Averaging 2 x 2 makes five shades of an edge, where Lanczos makes dozens: 61 KB of a run of 500 steps, not 96.
        """
        wide, tall = (side - 1 for side in self.image.size)
        self.draw.rounded_rectangle((0, 0, wide, tall), _CORNER * self.unit, outline=LINE, width=self.unit)
        card = self.image.resize(self.size, Image.Resampling.BOX).quantize(COLOURS - 1)
        outside = Image.new("1", self.size, 1)
        corners = (0, 0, self.size[0] - 1, self.size[1] - 1)
        ImageDraw.Draw(outside).rounded_rectangle(corners, _CORNER * SCALE, fill=0)
        known = card.getpalette() or []
        card.putpalette([*known, *([0] * (3 * COLOURS - len(known)))])
        card.paste(COLOURS - 1, mask=outside)
        data = io.BytesIO()
        card.save(data, "PNG", optimize=True, transparency=COLOURS - 1)
        return data.getvalue()


def draw(feed: Feed) -> bytes:
    """The picture of a run as it is now, PNG at twice the size of its CSS pixels."""
    phases = feed.phases()
    rows = min(len(phases), MOST_ROWS)
    bottom = 348
    height = bottom + (58 + 19 * rows + (16 if len(phases) > rows else 0) if rows else 8)
    items = (feed.samples.get("items") or [])[:SAMPLES]
    advice = fonts.advice(words(feed))
    canvas = _Canvas(WIDTH, height + (124 if items else 0) + (22 if advice else 0))
    _head(canvas, feed)
    _figures(canvas, feed)
    steps = (0.0, float(max(feed.step, 1)))
    x, y = feed.curves["loss"].points()
    curves = [_Curve(x, y, PALE, 1.2), _Curve(x, smooth(y), BLUE, 2.2)]
    held_out = list(zip(*feed.curves["held_out"].points(), strict=True))
    _chart(canvas, _Plot(16, 116, 424, "Loss by step", steps), curves, held_out)
    tokens = _Curve(*feed.curves["tokens_per_s"].points(), BLUE, 1.5)
    _chart(canvas, _Plot(460, 116, 424, "Tokens/s by step", steps, from_zero=True), [tokens])
    if rows:
        _phases(canvas, bottom, phases[:rows], feed.roles(), len(phases) - rows)
    if items:
        _samples(canvas, height, feed.paths.samples / Path(feed.samples["folder"]).name, items)
    if advice:
        canvas.text(16, canvas.size[1] / SCALE - 10, canvas.fit(advice, 11, WIDTH - 32), 11, RED)
    return canvas.png()


def words(feed: Feed) -> str:
    """What people have written into a picture: names, reasons, captions."""
    items = (feed.samples.get("items") or [])[:SAMPLES]
    captions = [str(item.get(key) or "") for item in items for key in ("text", "truth")]
    return " ".join([feed.paths.root.name, feed.plan.name, feed.reason, *captions])


def _head(canvas: _Canvas, feed: Feed) -> None:
    pill = canvas.width(feed.state, 13) + 26
    canvas.box(16, 14, pill, 24, STATE_COLOURS.get(feed.state, GREY), 12)
    canvas.text(16 + pill / 2, 31, feed.state, 13, WHITE, "ms")
    count = f"step {feed.step:,} of {feed.steps:,}"
    right = WIDTH - 16 - canvas.width(count, 13)
    canvas.text(right, 31, count, 13)
    name = canvas.fit(feed.paths.root.name, 14, right - pill - 230)
    canvas.text(28 + pill, 31, name, 14)
    left = 42 + pill + canvas.width(name, 14)
    room = right - 14 - left
    canvas.box(left, 23, room, 7, LINE, 3.5)
    canvas.box(left, 23, room * min(1.0, feed.step / max(1, feed.steps)), 7, STATE_COLOURS.get(feed.state, GREY), 3.5)
    failed = feed.state in ("failed", "deleted")
    line = feed.reason if failed else plan_text(feed.plan)
    canvas.text(16, 57, canvas.fit(line, 12, WIDTH - 32), 12, RED if failed else SOFT)


def _figures(canvas: _Canvas, feed: Feed) -> None:
    last = feed.last
    held_out = feed.curves["held_out"].last
    figures = [
        ("loss", number(last.get("loss"), 4)),
        ("held-out loss", number(held_out[1] if held_out else None, 4)),
        ("tokens/s", number(last.get("tokens_per_s"))),
        ("images/s", number(last.get("images_per_s"))),
        ("a step", duration_of(last.get("seconds"))),
    ]
    width = (WIDTH - 32 - 4 * 10) / 5
    for index, (label, value) in enumerate(figures):
        x = 16 + index * (width + 10)
        canvas.box(x, 66, width, 40, RAISED, 5)
        canvas.text(x + 10, 84, value, 16)
        canvas.text(x + 10, 99, label, 11, SOFT)


def duration_of(seconds: float | None) -> str:
    """A step's time: milliseconds below ten seconds."""
    if seconds is None:
        return "-"
    return f"{seconds * 1000:,.0f} ms" if seconds < 10 else duration(seconds)


@dataclass(frozen=True)
class _Plot:
    """Where a chart stands and what its x axis spans (steps)."""

    x: float
    y: float
    w: float
    title: str
    steps: tuple[float, float]
    from_zero: bool = False


@dataclass(frozen=True)
class _Curve:
    """A curve's points and pen."""

    x: Sequence[float]
    y: Sequence[float]
    colour: str
    width: float


def _chart(canvas: _Canvas, plot: _Plot, curves: Sequence[_Curve], dots: Sequence[tuple[float, float]] = ()) -> None:
    x, y, w, steps = plot.x, plot.y, plot.w, plot.steps
    canvas.text(x, y + 14, plot.title, 12, SOFT)
    left, top, right, bottom = x + 44, y + 26, x + w - 4, y + 192
    low, high = span([value for curve in curves for value in curve.y] + [value for _, value in dots], plot.from_zero)

    def place(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
        wide, tall = max(steps[1] - steps[0], 1e-9), high - low
        return [
            (
                left + (px - steps[0]) / wide * (right - left),
                bottom - (min(max(py, low), high) - low) / tall * (bottom - top),
            )
            for px, py in points
            if math.isfinite(py)
        ]

    for tick in nice_ticks(low, high, 5):
        level = place([(steps[0], tick)])[0][1]
        canvas.line([(left, level), (right, level)], LINE, 0.75)
        canvas.text(left - 7, level + 4, number(tick), 11, SOFT, "rs")
    for tick in nice_ticks(*steps, 6):
        if tick == int(tick):
            canvas.text(place([(tick, low)])[0][0], bottom + 16, f"{tick:,.0f}", 11, SOFT, "ms")
    for curve in curves:
        canvas.line(place(zip(curve.x, curve.y, strict=True)), curve.colour, curve.width)
    for px, py in place(dots):
        canvas.dot(px, py, GREEN)
    if dots:
        canvas.dot(right - 60, y + 10, GREEN)
        canvas.text(right - 52, y + 14, "held-out", 11, SOFT)


def _phases(canvas: _Canvas, y: float, phases: list[list[float]], roles: list[str], more: int) -> None:
    canvas.text(16, y, "Time per phase, mean of the last steps (ms a step)", 12, SOFT)
    used = [index for index in range(len(PHASES)) if any(row[index] > 0 for row in phases)]
    x = 16.0
    for index in used:
        canvas.box(x, y + 10, 10, 10, PHASE_COLOURS.get(PHASES[index], OTHER), 2)
        canvas.text(x + 14, y + 19, PHASES[index], 11, SOFT)
        x += 28 + canvas.width(PHASES[index], 11)
    most = max(max(sum(row) for row in phases), 1e-9)
    for rank, row in enumerate(phases):
        top = y + 32 + 19 * rank
        canvas.text(16, top + 11, canvas.fit(f"{rank}  {roles[rank]}", 12, 140), 12)
        x = 160.0
        for index in used:
            length = row[index] / most * (WIDTH - 160 - 76)
            canvas.box(x, top, length, 13, PHASE_COLOURS.get(PHASES[index], OTHER))
            x += length
        canvas.text(WIDTH - 16, top + 11, f"{sum(row) * 1000:,.0f}", 12, SOFT, "rs")
    if more > 0:
        canvas.text(16, y + 32 + 19 * len(phases) + 9, f"and {more} more ranks", 11, SOFT)


def _samples(canvas: _Canvas, y: float, folder: Path, items: Sequence[Mapping[str, Any]]) -> None:
    """Held-out pictures with what the model wrote and the truth."""
    canvas.text(16, y + 8, "Held-out pictures: what the model wrote, and the truth below it", 12, SOFT)
    room = (WIDTH - 32) / SAMPLES
    for index, item in enumerate(items):
        x = 16 + index * room
        side = 62 * canvas.unit
        try:
            with Image.open(folder / Path(str(item["image"])).name) as opened:
                shown = ImageOps.contain(opened.convert("RGBA"), (side, side))
            canvas.image.paste(shown, (round(x * canvas.unit), round((y + 16) * canvas.unit)), shown)
        except OSError:
            canvas.box(x, y + 16, 62, 62, RAISED, 4)
        text, truth = (str(item.get(key) or "").strip() for key in ("text", "truth"))
        canvas.text(x, y + 94, canvas.fit(text or "(nothing)", 11, room - 8), 11, GREEN if text == truth else INK)
        canvas.text(x, y + 109, canvas.fit(truth, 11, room - 8), 11, SOFT)
