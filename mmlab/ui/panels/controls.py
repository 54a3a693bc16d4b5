"""Steering: buttons to verbs. Verbs write a command file and return, so nothing here waits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmlab.errors import PlanError
from mmlab.messages import Event
from mmlab.plan.typed import changes_of
from mmlab.ui.commands import in_words, newest, waiting
from mmlab.ui.panel import RunPanel
from mmlab.ui.words import command_text, event_text

BUTTONS = ("pause", "resume", "stop", "abort")
MOST = 8
"""Waiting commands that are listed."""


class Controls(RunPanel):
    """Pause, step, learning rates, checkpoint, relayout, stop, abort: each with what has become of it, whoever asked:
    waiting for which step's end, applied after which step on how many ranks, or refused and why."""

    name = "controls"
    title = "Steer the run"
    spoken = ("waiting.*", "acked.text", "controls.*.text", "controls.*.message", "text")
    slow = frozenset({"check_relayout", "relayout"})

    def frame(self) -> dict[str, Any]:
        """State, base learning rates, waiting commands in words, the last answer of the ranks, the newest command of
        each control."""
        acked = next((_acked(event) for event in reversed(self.feed.recent) if event["kind"] == "command"), None)
        unanswered = waiting(self.feed)
        return {
            "name": self.feed.paths.root.name,
            "state": self.feed.state,
            "step": self.feed.step,
            "rates": self._rates(),
            "waiting": [in_words(entry) for entry in unanswered[:MOST]],
            "acked": acked,
            "controls": newest(self.feed, unanswered),
        }

    def _rates(self) -> dict[str, dict[str, Any]]:
        now: Mapping[str, float] = self.feed.last.get("lr") or {}
        return {
            name: {"base": base, "now": now.get(name), "frozen": getattr(self.feed.plan.train, name).frozen}
            for name, base in self.feed.rates.items()
        }

    def handle(self, verb: str, args: dict[str, Any]) -> Any:
        """A button: the command in words and its id, once it is in the inbox. `check_relayout` sends nothing: it says
        what would change, in how many ranks."""
        run = self.source.run
        if verb == "check_relayout":
            return self._check(_layout(args))
        if verb == "step":
            sent = run.step(int(args.get("n", 1)))
        elif verb == "set":
            sent = run.set(str(args["key"]), float(args["value"]))
            args = {"values": {args["key"]: args["value"]}}
        elif verb == "checkpoint":
            sent = run.checkpoint(str(args.get("name", "")).strip())
        elif verb == "relayout":
            sent = run.relayout(*_layout(args))
            return {"text": f"relayout {args['changes']}", "id": sent.id}
        elif verb in BUTTONS:
            sent = getattr(run, verb)()
        else:
            raise ValueError(f"unknown command {verb!r}")
        return {"text": command_text(verb, args), "id": sent.id}

    def _check(self, changes: list[str]) -> dict[str, Any]:
        before, after = self.source.run.relaid(*changes)
        found = [f"{change.key} {change.before} -> {change.after}" for change in before.diff(after)]
        return {"changes": found, "before": before.world_size, "after": after.world_size}

    def text(self) -> str:
        """What waits, and the last answer."""
        frame = self.frame()
        waiting = f"waiting for the step boundary: {'; '.join(frame['waiting'])}" if frame["waiting"] else ""
        acked = frame["acked"]["text"] if frame["acked"] else "no command yet"
        return "\n".join(filter(None, [waiting, acked]))


def _layout(args: Mapping[str, Any]) -> list[str]:
    """The layout that a page asks for: changes, or a plan. PlanError where there is none."""
    changes = changes_of(str(args.get("changes", "")))
    if not changes:
        raise PlanError("no change was given; write key=value, such as parallel.tp=2")
    return changes


def _acked(event: Event) -> dict[str, Any]:
    return {"text": event_text(event), "ok": bool(event.get("ok"))}
