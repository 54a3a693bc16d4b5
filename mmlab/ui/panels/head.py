"""State, progress and figures of a run."""

from __future__ import annotations

from typing import Any

from mmlab.ui.panel import RunPanel
from mmlab.ui.words import compression_text, data_text, number


class Head(RunPanel):
    """What the run does right now, in one line and a row of figures."""

    name = "head"
    title = "State"
    spoken = ("reason", "data", "compression")

    def frame(self) -> dict[str, Any]:
        """State, step and the figures of the last step."""
        feed, last = self.feed, self.feed.last
        seconds = last.get("seconds")
        held_out = feed.curves["held_out"].last
        return {
            "name": feed.paths.root.name,
            "state": feed.state,
            "doing": feed.doing,
            "reason": feed.reason,
            "step": feed.step,
            "steps": feed.steps,
            "loss": finite(last.get("loss")),
            "held_out": finite(held_out[1] if held_out else None),
            "tokens_per_s": last.get("tokens_per_s"),
            "images_per_s": last.get("images_per_s"),
            "seconds": seconds,
            "data": data_text(last),
            "left": seconds * max(0, feed.steps - feed.step) if seconds else None,
            "compression": compression_text(last),
        }

    def text(self) -> str:
        """State, step and loss."""
        feed = self.feed
        reason = f": {feed.reason}" if feed.reason else ""
        line = f"{feed.paths.root.name}: {feed.state}{reason}, step {feed.step} of {feed.steps}"
        return line + (f", loss {number(feed.last.get('loss'), 4)}" if feed.last else "")


def finite(value: float | None) -> float | str | None:
    """A number that JSON can carry; the words nan and inf for those it cannot."""
    return value if value is None or abs(value) < float("inf") else str(value)
