"""Charts of the report as inline SVG: curves and stacked bars."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from mmlab.messages import PHASES
from mmlab.ui.picture import GREEN, INK, LINE, OTHER, PHASE_COLOURS, SOFT
from mmlab.ui.scales import nice_ticks, span
from mmlab.ui.words import number

WIDTH, HEIGHT = 400, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 10, 26, 28


Place = Callable[[float, float], tuple[float, float]]
"""From step and value to pixels."""


@dataclass(frozen=True)
class Curve:
    """A curve: name, x, y, colour and stroke width in pixels; `dots` draws its points instead of a line."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    width: float = 1.5
    dots: bool = False


def line_chart(curves: Sequence[Curve], label: str, from_zero: bool = False) -> str:
    """Curves over steps with a legend. `label` says what the chart shows, for readers without eyes."""
    steps = (0.0, max([1.0, *(x for curve in curves for x in curve.x)]))
    low, high = span([y for curve in curves for y in curve.y], from_zero)

    def at(x: float, y: float) -> tuple[float, float]:
        across = _LEFT + x / steps[1] * (WIDTH - _LEFT - _RIGHT)
        up = HEIGHT - _BOTTOM - (y - low) / (high - low) * (HEIGHT - _TOP - _BOTTOM)
        return across, up

    parts = [_axes(at, steps, (low, high))]
    for curve in curves:
        points = [at(x, y) for x, y in zip(curve.x, curve.y, strict=True) if math.isfinite(y)]
        if curve.dots:
            parts += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{curve.colour}" stroke="#fff"/>' for x, y in points
            ]
        elif points:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            parts.append(
                f'<polyline points="{path}" fill="none" stroke="{curve.colour}" stroke-width="{curve.width}" '
                'stroke-linejoin="round"/>'
            )
    return _svg(WIDTH, HEIGHT, label, _legend([(curve.name, curve.colour) for curve in curves], _LEFT) + "".join(parts))


def phase_chart(phases: list[list[float]], roles: Sequence[str]) -> str:
    """A stacked bar for each rank: milliseconds of each phase of a mean step."""
    width, left, row = 1140, 150, 22
    used = [index for index in range(len(PHASES)) if any(times[index] > 0 for times in phases)]
    most = max([1e-9, *(sum(times) for times in phases)])
    scale = (width - left - 70) / most
    parts = [_legend([(PHASES[index], _phase_colour(index)) for index in used], left)]
    for rank, times in enumerate(phases):
        y = 30 + rank * row
        parts.append(_text(0, y + 12, f"{rank}  {roles[rank]}", INK, 12.5))
        x = float(left)
        for index in used:
            length = times[index] * scale
            title = f"{PHASES[index]} {times[index] * 1000:.1f} ms"
            parts.append(
                f'<rect x="{x:.2f}" y="{y}" width="{length:.2f}" height="15" fill="{_phase_colour(index)}">'
                f"<title>{title}</title></rect>"
            )
            x += length
        parts.append(_text(x + 8, y + 12, f"{sum(times) * 1000:,.0f} ms", SOFT, 11.5))
    return _svg(width, 34 + row * len(phases), "time per phase for each rank", "".join(parts))


def _phase_colour(index: int) -> str:
    return PHASE_COLOURS.get(PHASES[index], OTHER)


def _axes(at: Place, steps: tuple[float, float], values: tuple[float, float]) -> str:
    parts = []
    for tick in nice_ticks(*values, 5):
        x, y = at(0, tick)
        parts.append(f'<line x1="{x:.1f}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{LINE}"/>')
        parts.append(_text(x - 8, y + 4, number(tick), SOFT, 11, "end"))
    for tick in nice_ticks(*steps, 6):
        if tick == int(tick):
            parts.append(_text(at(tick, values[0])[0], HEIGHT - 10, f"{tick:,.0f}", SOFT, 11, "middle"))
    return "".join(parts)


def _legend(entries: Sequence[tuple[str, str]], left: float) -> str:
    parts, x = [], float(left)
    for name, colour in entries:
        parts.append(f'<rect x="{x:.1f}" y="5" width="10" height="10" rx="2" fill="{colour}"/>')
        parts.append(_text(x + 15, 14, name, SOFT, 11.5))
        x += 32 + 6.4 * len(name)
    return "".join(parts)


def _text(x: float, y: float, text: str, colour: str, size: float, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{colour}" text-anchor="{anchor}" '
        f'xml:space="preserve">{escape(text)}</text>'
    )


def _svg(width: float, height: float, label: str, body: str) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" aria-label="{escape(label)}" '
        f'font-family="system-ui,sans-serif">{body}</svg>'
    )


def held_out_curve(x: Sequence[float], y: Sequence[float]) -> Curve:
    """The dots of held-out losses."""
    return Curve("held-out", x, y, GREEN, dots=True)
