"""The last events of a run."""

from __future__ import annotations

from typing import Any

from mmlab.messages import Event
from mmlab.ui.panel import RunPanel
from mmlab.ui.words import clock, event_text

EVENTS = 30
"""Last events listed."""


class Events(RunPanel):
    """What happened last: commands, checkpoints, evaluations, warnings, failures."""

    name = "events"
    title = "Last events"
    spoken = ("events.*.text",)

    def frame(self) -> dict[str, Any]:
        """The last events in words, oldest first."""
        return {"events": [_line(event) for event in list(self.feed.recent)[-EVENTS:]]}

    def text(self) -> str:
        """One line an event."""
        return "\n".join(f"{line['time']}  {line['text']}" for line in self.frame()["events"]) or "no events yet"


def _line(event: Event) -> dict[str, Any]:
    refused = event["kind"] == "command" and not event.get("ok")
    began = event["kind"] == "recovery" and not event.get("done")
    bad = refused or began or event["kind"] in ("warning", "bad_image") or event.get("state") == "failed"
    return {"time": clock(event), "text": event_text(event), "bad": bad}
