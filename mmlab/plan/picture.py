"""The schedule as a picture: a Gantt chart in SVG and in text, for planned and for measured timelines alike."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from mmlab.plan.ops import COMPUTE, Timed, Timeline
from mmlab.plan.simulate import bubble
from mmlab.plan.tables import FAINT, FONT, GRID, INK

COLOURS = {
    "encode": "#009e73",
    "encode_ahead": "#7fcfb6",
    "encode_backward": "#cc79a7",
    "forward": "#56b4e9",
    "backward": "#e69f00",
    "backward_input": "#e69f00",
    "backward_weight": "#f0e442",
    "update": "#0072b2",
    "reduce": "#d55e00",
    "reduce_embedding": "#d55e00",
    "norm": "#8a6d3b",
}
"""Fill of each kind (Okabe and Ito 2008: told apart by colour-blind readers); transfers share one, waits another."""
TRANSFER, WAIT = "#64748b", "#dbe2ea"

NAMES = {
    "encode": "encode images",
    "encode_ahead": "encode later steps",
    "encode_backward": "encoder backward",
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward, inputs",
    "backward_weight": "backward, weights",
    "update": "update",
    "reduce": "reduce gradients",
    "reduce_embedding": "reduce gradients",
    "norm": "norm, loss, flags",
}
"""Legend text of each kind."""

_ROW, _GAP, _PLOT, _TOP = 22, 5, 920, 58


def _colour(kind: str) -> str:
    if kind.startswith("recv"):
        return WAIT
    return COLOURS.get(kind, TRANSFER)


def _tick(span: float) -> float:
    """A round distance between ticks: about eight of them."""
    size = 10.0 ** _floor_log10(span / 8)
    return next(size * step for step in (1, 2, 5, 10) if size * step >= span / 8)


def _floor_log10(value: float) -> int:
    exponent = 0
    while value < 10.0**exponent:
        exponent -= 1
    while value >= 10.0 ** (exponent + 1):
        exponent += 1
    return exponent


def _bar(timed: Timed, x: float, width: float, y: float, unit: str) -> str:
    """One op as a rectangle with its microbatch number and a tooltip: compute high, communication lower, waits low."""
    op = timed.op
    low = op.kind.startswith("recv")
    share = 1.0 if op.kind in COMPUTE or op.kind == "update" else 0.3 if low else 0.66
    height, top = _ROW * share, y + _ROW * (1 - share) / 2
    chunk = f" chunk {op.chunk}" if op.chunk else ""
    which = f" {op.microbatch}{chunk}" if op.microbatch >= 0 else ""
    about = f"{op.kind}{which}: {timed.start:.4g} to {timed.end:.4g} {unit}"
    edge = ' stroke="#fff" stroke-width="0.75"' if width > 2.5 and not low else ""
    text = ""
    if op.kind in COMPUTE and op.microbatch >= 0 and width >= 6.3 * len(str(op.microbatch)) + 2:
        text = (
            f'<text x="{x + width / 2:.1f}" y="{y + _ROW / 2 + 4:.1f}" text-anchor="middle" font-size="11.5" '
            f'fill="{INK}">{op.microbatch}</text>'
        )
    rect = f'<rect x="{x:.2f}" y="{top:.1f}" width="{max(width, 0.6):.2f}" height="{height:.1f}"'
    paler = f' fill-opacity="{max(0.25, 0.55**op.chunk):.2g}"' if op.chunk and op.kind in COMPUTE else ""
    return f'<g><title>{escape(about)}</title>{rect} fill="{_colour(op.kind)}"{paler}{edge}/>{text}</g>'


def _legend(kinds: Sequence[str], width: float, top: float) -> tuple[str, float]:
    """The meaning of colours from `top` on, in as many rows as the picture's width calls for; where it ends."""
    entries: dict[str, str] = {}
    for kind in kinds:
        if kind.startswith("recv"):
            entries["wait, receive"] = WAIT
        else:
            entries[NAMES.get(kind, "send")] = _colour(kind)
    order = [*dict.fromkeys(NAMES.values()), "send", "wait, receive"]
    parts, x, y = [], 14.0, top
    for name in sorted(entries, key=order.index):
        room = 18 + 6.6 * len(name)
        if x > 14 and x + room > width - 14:
            x, y = 14.0, y + 20
        parts.append(
            f'<rect x="{x:.0f}" y="{y - 10:.0f}" width="13" height="13" rx="2" fill="{entries[name]}"/>'
            f'<text x="{x + 18:.0f}" y="{y + 1:.0f}" font-size="12" fill="{FAINT}">{name}</text>'
        )
        x += room + 18
    return "".join(parts), y


def schedule_svg(timeline: Timeline, title: str = "", labels: Sequence[str] = (), unit: str = "s") -> str:
    """A Gantt chart: one row a rank, colours by kind of op, microbatch numbers, the bubble in per cent.

    `labels` name the rows ("rank 0" and so on where absent); `unit` is that of the timeline. The background is white
    whatever the theme.
    """
    labels = list(labels) or [f"rank {rank}" for rank in range(len(timeline))]
    span = max((timed.end for ops in timeline for timed in ops), default=0.0) or 1.0
    left = 24 + 6.9 * max((len(label) for label in labels), default=0)
    scale = _PLOT / span
    bottom = _TOP + len(timeline) * (_ROW + _GAP)
    width = left + _PLOT + 24
    parts = [_axis(span, unit, left, scale, bottom)]
    for index, (label, ops) in enumerate(zip(labels, timeline, strict=True)):
        y = _TOP + index * (_ROW + _GAP)
        middle = y + _ROW / 2
        parts.append(
            f'<text x="{left - 10:.0f}" y="{middle + 4:.1f}" text-anchor="end" font-size="12" fill="{INK}">'
            f'{escape(label)}</text><line x1="{left:.1f}" x2="{left + _PLOT:.1f}" y1="{middle:.1f}" y2="{middle:.1f}" '
            f'stroke="{WAIT}" stroke-width="{_ROW * 0.3:.1f}"/>'
        )
        # Waits first, so that short transfers next to them stay visible.
        for timed in sorted(ops, key=lambda t: not t.op.kind.startswith("recv")):
            if timed.end > timed.start:
                parts.append(_bar(timed, left + timed.start * scale, (timed.end - timed.start) * scale, y, unit))
    heading = escape(title or "schedule")
    summary = f"bubble {bubble(timeline):.0%} of the stages' time · step {span:.3g} {unit}"
    if any(timed.op.chunk for ops in timeline for timed in ops):
        summary += " · paler: a rank's further model chunks"
    kinds = sorted({timed.op.kind for ops in timeline for timed in ops})
    legend, last = _legend(kinds, width, bottom + 46)
    height = last + 14
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'style="max-width:100%;height:auto" role="img" aria-label="{heading}; {escape(summary)}" '
        f'font-family="{FONT}"><rect width="100%" height="100%" rx="8" fill="#fff"/>'
        f'<text x="14" y="24" font-size="15" font-weight="600" fill="{INK}">{heading}</text>'
        f'<text x="14" y="44" font-size="12.5" fill="{FAINT}">{escape(summary)}</text>'
        f"{''.join(parts)}{legend}</svg>"
    )


def _axis(span: float, unit: str, left: float, scale: float, bottom: float) -> str:
    step, parts = _tick(span), []
    for i in range(int(span / step + 1e-9) + 1):
        x = left + i * step * scale
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 4}" y2="{bottom}" stroke="{GRID}"/>'
            f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle" font-size="11" fill="{FAINT}">{i * step:.4g}'
            "</text>"
        )
    parts.append(
        f'<text x="{left + span * scale:.1f}" y="{bottom + 30}" text-anchor="end" font-size="11" fill="{FAINT}">'
        f"time in {unit}</text>"
    )
    return "".join(parts)


LETTERS = {
    "forward": "F",
    "backward": "B",
    "backward_input": "B",
    "backward_weight": "W",
    "encode": "E",
    "encode_ahead": "e",
    "encode_backward": "G",
    "reduce": "r",
    "reduce_embedding": "r",
    "norm": "n",
    "update": "u",
}
"""Letter of each kind in text; those without are not shown there."""


def schedule_text(timeline: Timeline, labels: Sequence[str] = (), columns: int = 96) -> str:
    """The chart in characters: F forward, B backward (of the inputs alone where there is W, that of the weights), E
    encode, G encoder backward, each with its microbatch; small letters stand for a rank's further model chunks."""
    labels = list(labels) or [f"rank {rank}" for rank in range(len(timeline))]
    span = max((timed.end for ops in timeline for timed in ops), default=0.0) or 1.0
    width = max((len(label) for label in labels), default=0)
    lines = []
    for label, ops in zip(labels, timeline, strict=True):
        row = [" "] * columns
        for timed in ops:
            kind = timed.op.kind
            if kind not in LETTERS:
                continue
            start = min(columns - 1, round(timed.start / span * columns))
            cells = max(1, min(columns, round(timed.end / span * columns)) - start)
            number = str(timed.op.microbatch) if kind in COMPUTE else ""
            letter = LETTERS[kind].lower() if timed.op.chunk else LETTERS[kind]
            text = (letter + number).ljust(cells, "-" if kind in COMPUTE else LETTERS[kind])[:cells]
            row[start : start + cells] = list(text)
        lines.append(f"{label.ljust(width)} |{''.join(row)}|")
    kinds = {timed.op.kind for ops in timeline for timed in ops}
    split = "B backward of inputs, W of weights" if "backward_weight" in kinds else "B backward"
    chunks = "f, b further model chunks, " if any(timed.op.chunk for ops in timeline for timed in ops) else ""
    lines.append(
        f"F forward, {split}, {chunks}E encode, G encoder backward, r reduce, n norm, u update; "
        f"bubble {bubble(timeline):.0%} of the stages' time"
    )
    return "\n".join(lines)
