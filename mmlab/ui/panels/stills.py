"""Charts as still SVG: what a saved notebook shows of them. About 5 KB for each curve."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape

from mmlab.ui.feed import Feed
from mmlab.ui.picture import BLUE, GREEN, GREY, ORANGE, OTHER, PALE, PHASE_COLOURS
from mmlab.ui.scales import smooth
from mmlab.ui.series import Series
from mmlab.ui.svg import Curve, held_out_curve, line_chart

POINTS = 200
"""Points drawn of each curve: a chart is 346 pixels wide."""
VIOLET = "#7a3fc4"
COLOURS = {
    "tokens_per_s": BLUE, "images_per_s": ORANGE, "grad_norm_total": GREY, "data_wait": BLUE,
    "vision": VIOLET, "projector": ORANGE, "language": BLUE,
}  # fmt: skip
OTHER_RUNS = (ORANGE, VIOLET, GREEN, GREY)
WORDS = {"tokens_per_s": "tokens/s", "images_per_s": "images/s", "grad_norm_total": "all",
         "data_wait": "data wait"}  # fmt: skip

Names = Callable[[Iterable[str], Iterable[str]], list[str]]


def still_charts(
    runs: Sequence[tuple[str, Feed]], charts: Mapping[str, tuple[str, tuple[str, ...]]], names_of: Names
) -> str:
    """One chart beside the other, on white. `runs`: (name, feed); the first is drawn in full, of others the loss."""
    drawn = []
    feed = runs[0][1]
    for chart, (title, _) in charts.items():
        names = [name for name in names_of([chart], feed.curves) if len(feed.curves[name])]
        groups = [[name] for name in names] if chart == "throughput" else [names]
        for group in groups:
            curves = [curve for name in group for curve in _curves(feed, name)]
            if chart == "loss":
                curves += [_other(index, name, other) for index, (name, other) in enumerate(runs[1:])]
            label = title if len(groups) == 1 else f"{title}: {word(group[0])}"
            body = line_chart(curves, label, from_zero=chart not in ("loss", "rates"))
            drawn.append(f'<figure style="margin:0"><figcaption>{escape(label)}</figcaption>{body}</figure>')
    style = (
        "display:flex;flex-wrap:wrap;gap:12px 24px;background:#fff;color:#1d2430;padding:10px;font:13px sans-serif;"
        "border:1px solid #d5dae1;border-radius:8px"
    )
    return f'<div style="{style}">{"".join(drawn)}</div>'


def word(name: str) -> str:
    """A curve as people call it."""
    return WORDS.get(name, name.rpartition(".")[2])


def _curves(feed: Feed, name: str) -> list[Curve]:
    x, y = feed.curves[name].points()
    if name == "held_out":
        return [held_out_curve(x, y)]
    if name == "loss":
        return [Curve("loss", *_thin(x, y), PALE, 1.0), Curve("smoothed", *_sampled(x, smooth(y)), BLUE, 2.0)]
    last = name.rpartition(".")[2]
    colour = PHASE_COLOURS.get(last, OTHER) if name.startswith("phase.") else COLOURS.get(last, GREY)
    return [Curve(word(name), *_thin(x, y), colour)]


def _other(index: int, name: str, feed: Feed) -> Curve:
    x, y = feed.curves["loss"].points()
    return Curve(
        name if len(name) <= 18 else f"…{name[-17:]}", *_sampled(x, smooth(y)), OTHER_RUNS[index % len(OTHER_RUNS)], 1.5
    )


def _thin(x: Sequence[float], y: Sequence[float]) -> tuple[Sequence[float], Sequence[float]]:
    series = Series(POINTS)
    for point in zip(x, y, strict=True):
        series.add(*point)
    return series.points()


def _sampled(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float]]:
    stride = max(1, len(x) // POINTS)
    kept = sorted({*range(0, len(x), stride), len(x) - 1} if len(x) else set())
    return [x[index] for index in kept], [y[index] for index in kept]
