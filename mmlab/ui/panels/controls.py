"""Steering: buttons to verbs. Verbs write a command file and return, so nothing here waits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmlab.messages import Event, read_json
from mmlab.ui.panel import RunPanel
from mmlab.ui.words import command_text, event_text

BUTTONS = ("pause", "resume", "stop", "abort", "checkpoint")


class Controls(RunPanel):
    """Pause, step, learning rates, checkpoint, stop, abort; what waits for the boundary and what all ranks acked."""

    name = "controls"
    title = "Steer the run"

    def frame(self) -> dict[str, Any]:
        """State, base learning rates, waiting commands in words, the last answer of the ranks."""
        acked = next((_acked(event) for event in reversed(self.feed.recent) if event["kind"] == "command"), None)
        return {
            "name": self.feed.paths.root.name,
            "state": self.feed.state,
            "step": self.feed.step,
            "rates": self._rates(),
            "waiting": self.waiting(),
            "acked": acked,
        }

    def _rates(self) -> dict[str, dict[str, Any]]:
        now: Mapping[str, float] = self.feed.last.get("lr") or {}
        return {
            name: {"base": base, "now": now.get(name), "frozen": getattr(self.feed.plan.train, name).frozen}
            for name, base in self.feed.rates.items()
        }

    def waiting(self) -> list[str]:
        """Commands, from anywhere, that wait for the next step boundary, in words."""
        found = [read_json(path) for path in sorted(self.feed.paths.control.glob("*.json"))]
        return [
            command_text(entry.get("verb", "?"), entry.get("args") or {}) for entry in found if isinstance(entry, dict)
        ]

    def handle(self, verb: str, args: dict[str, Any]) -> Any:
        """A button: the command in words, once it is in the inbox."""
        run = self.source.run
        if verb == "step":
            run.step(int(args.get("n", 1)))
        elif verb == "set":
            run.set(str(args["key"]), float(args["value"]))
            args = {"values": {args["key"]: args["value"]}}
        elif verb in BUTTONS:
            getattr(run, verb)()
        else:
            raise ValueError(f"unknown command {verb!r}")
        return {"text": command_text(verb, args)}

    def text(self) -> str:
        """What waits, and the last answer."""
        frame = self.frame()
        waiting = f"waiting for the step boundary: {'; '.join(frame['waiting'])}" if frame["waiting"] else ""
        acked = frame["acked"]["text"] if frame["acked"] else "no command yet"
        return "\n".join(filter(None, [waiting, acked]))


def _acked(event: Event) -> dict[str, Any]:
    return {"text": event_text(event), "ok": bool(event.get("ok"))}
