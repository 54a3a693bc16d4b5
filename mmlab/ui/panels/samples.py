"""What the model writes for held-out pictures, beside the truth."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from mmlab.messages import Event
from mmlab.plan.tables import text_table
from mmlab.ui.panel import RunPanel
from mmlab.ui.source import RunSource
from mmlab.ui.thumbnails import thumbnail
from mmlab.ui.words import clock

PICTURES = 24
"""Pictures of one step that are shown: 12 kB each at most."""
LONGEST = 400
"""Characters of a text that are shown."""


class Samples(RunPanel):
    """Held-out pictures with what the model writes for them and the truth, renewed at the run's cadence
    (`train.eval_every`); earlier steps on request."""

    name = "samples"
    title = "Samples"
    every = 0.5
    slow = frozenset({"step"})
    lasting = True

    def __init__(self, source: RunSource) -> None:
        super().__init__(source)
        self._made: tuple[str, dict[str, Any]] = ("", {})

    def frame(self) -> dict[str, Any]:
        """The steps there are, and the newest one: its items, and its pictures as data URLs by their content, which are
        therefore sent again only when they are others."""
        plan = self.feed.plan.train
        cadence = {"every": plan.eval_every, "wanted": plan.sample_images, "state": self.feed.state}
        steps = [[_folder(event), event.get("step"), clock(event)] for event in self.feed.sampled]
        return {**cadence, "steps": steps, **self._newest()}

    def _newest(self) -> dict[str, Any]:
        event = self.feed.samples
        if not event:
            return {"folder": "", "items": [], "pictures": {}}
        if self._made[0] != _folder(event):
            self._made = (_folder(event), self._shown(event))
        return self._made[1]

    def _shown(self, event: Event) -> dict[str, Any]:
        folder = self.feed.paths.samples / _folder(event)
        items, pictures = [], {}
        for item in list(event.get("items") or [])[:PICTURES]:
            found = thumbnail(folder / Path(str(item.get("image"))).name)
            if found is not None:
                pictures[found[0]] = found[1]
            texts = {name: str(item.get(name) or "")[:LONGEST] for name in ("prompt", "truth", "text")}
            items.append({"picture": found[0] if found else None, **texts, "right": is_right(item)})
        return {"folder": _folder(event), "items": items, "pictures": pictures}

    def handle(self, verb: str, args: dict[str, Any]) -> Any:
        """`step` {folder}: an earlier step's items and pictures, as in the frame."""
        if verb != "step":
            raise ValueError(f"unknown request {verb!r}")
        wanted = str(args.get("folder"))
        for event in reversed(list(self.feed.sampled)):
            if _folder(event) == wanted:
                return self._shown(event)
        raise ValueError(f"no samples {wanted!r}; they may have been of a step that is no longer listed")

    def text(self) -> str:
        """A table of the newest step."""
        event = self.feed.samples
        items = list(event.get("items") or [])[:PICTURES]
        rows = [
            ["yes" if is_right(i) else "no", _short(i, "truth"), _short(i, "text"), _short(i, "prompt")] for i in items
        ]
        if not rows:
            return "no samples yet"
        return f"step {event.get('step')}, {rights(items)}\n{text_table(['right', 'truth', 'written', 'prompt'], rows)}"

    def html(self) -> str:
        """The newest step's pictures with their texts."""
        event = self.feed.samples
        if not event:
            return "<p>no samples yet</p>"
        shown = self._newest()
        cards = "".join(_card(item, shown["pictures"]) for item in shown["items"])
        return f"<p>step {event.get('step')}, {rights(shown['items'])}</p><div>{cards}</div>"


def is_right(item: dict[str, Any]) -> bool:
    """Whether what was written is the truth, word for word."""
    return str(item.get("text") or "").strip() == str(item.get("truth") or "").strip()


def rights(items: Sequence[dict[str, Any]]) -> str:
    """How many are right."""
    return f"{sum(is_right(item) for item in items)} of {len(items)} right"


def _folder(event: Event) -> str:
    return Path(str(event.get("folder", ""))).name


def _short(item: dict[str, Any], name: str) -> str:
    text = " ".join(str(item.get(name) or "").split())
    return text if len(text) <= 40 else f"{text[:39]}…"


def _card(item: dict[str, Any], pictures: dict[str, str]) -> str:
    url = pictures.get(item["picture"] or "")
    picture = f'<img src="{url}" width="72" alt="{escape(item["truth"], quote=True)}">' if url else "(no picture)"
    mark = "✓" if item["right"] else "✗"
    style = "display:inline-block;width:160px;margin:4px;vertical-align:top;overflow-wrap:anywhere"
    texts = f"{mark} {escape(item['text'])}<br><small>{escape(item['truth'])}</small>"
    return f'<div style="{style}">{picture}<br>{texts}</div>'
