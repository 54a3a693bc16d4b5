"""A run as it is now, as text, picture and HTML: for cells, terminals and saved notebooks."""

from __future__ import annotations

import base64
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any

from mmlab.ui import fonts, picture
from mmlab.ui.feed import Feed
from mmlab.ui.words import clock, compression_text, data_text, event_text, number

BLOCKS = "▁▂▃▄▅▆▇█"
EVENTS = 8
"""Last events in the text."""


class Snapshot:
    """A still view of a run. Shows as a picture in a notebook, as text elsewhere."""

    def __init__(self, text: str, png: bytes) -> None:
        self.text = text
        """State, figures, a curve of the loss, ranks and last events."""
        self.png = png
        """The picture, at twice its size in CSS pixels."""

    def __repr__(self) -> str:
        return self.text

    def _repr_png_(self) -> tuple[bytes, dict[str, Any]]:
        return self.png, {"width": picture.WIDTH}

    def html(self) -> str:
        """The picture in a tag, with the text for who does not see it. Not what a cell holds: with the picture itself
        a saved notebook would have it twice."""
        data = base64.b64encode(self.png).decode()
        style = f"width:{picture.WIDTH}px;max-width:100%"
        return f'<img src="data:image/png;base64,{data}" alt="{escape(self.text)}" style="{style}">'

    def bundle(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """A mime bundle with picture and text, and its metadata."""
        data = {"image/png": base64.b64encode(self.png).decode(), "text/plain": self.text}
        return data, {"image/png": {"width": picture.WIDTH}}


def snapshot(run: Any) -> Snapshot:
    """The snapshot of a run: a `Run`, or the path of a run's folder."""
    feed = Feed(Path(getattr(run, "dir", run)))
    feed.read()
    feed.look()
    return of_feed(feed)


def of_feed(feed: Feed) -> Snapshot:
    """The snapshot of what a feed has read."""
    advice = fonts.advice(picture.words(feed))
    text = summary(feed) + (f"\n  in the picture: {advice}" if advice else "")
    return Snapshot(text, picture.draw(feed))


def summary(feed: Feed) -> str:
    """The run in a few lines of text."""
    lines = [f"{feed.paths.root.name}: {feed.state}, step {feed.step} of {feed.steps}"]
    if feed.reason:
        lines.append(f"  {feed.reason}")
    if feed.last:
        last = feed.last
        rates = f"{number(last.get('tokens_per_s'))} tokens/s, {number(last.get('images_per_s'))} images/s"
        lines.append(f"  loss {number(last.get('loss'), 4)}, {rates}")
        lines += [f"  data wait {waited}"] if (waited := data_text(last)) != "-" else []
        lines += [f"  {coded}"] if (coded := compression_text(last)) else []
        lines.append(f"  loss {spark(list(feed.curves['loss'].points()[1]))}")
    for rank in feed.ranks:
        alive = {True: "alive", False: "gone", None: "elsewhere"}[rank["alive"]]
        lines.append(f"  rank {rank['rank']}  {rank['role']:<14} pid {rank['pid']}  {alive}, {rank['phase']}")
    lines += [f"  {clock(event)}  {event_text(event)}" for event in list(feed.recent)[-EVENTS:]]
    return "\n".join(lines)


def spark(values: list[float], columns: int = 60) -> str:
    """A curve in block characters, each the mean of a share of the values."""
    finite = [value for value in values if value == value and abs(value) != float("inf")]
    if not finite:
        return ""
    columns = min(columns, len(finite))
    edges = [round(index * len(finite) / columns) for index in range(columns + 1)]
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((mean - low) * scale)] for mean in means)
