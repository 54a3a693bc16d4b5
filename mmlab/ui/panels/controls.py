"""Steering: buttons to verbs. Verbs write a command file and return, so nothing here waits."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from mmlab.messages import Event, read_json
from mmlab.ui.panel import RunPanel
from mmlab.ui.words import clock, command_text, event_text

BUTTONS = ("pause", "resume", "stop", "abort")
MOST = 8
"""Waiting commands that are listed."""
_CHANGE = re.compile(r"""[\w.]+\s*=\s*(?:\[[^\]]*\]|"[^"]*"|'[^']*'|[^\s,;]+)""")


class Controls(RunPanel):
    """Pause, step, learning rates, checkpoint, relayout, stop, abort: each with what has become of it, whoever asked:
    waiting for which step's end, applied after which step on how many ranks, or refused and why."""

    name = "controls"
    title = "Steer the run"
    slow = frozenset({"check_relayout", "relayout"})

    def frame(self) -> dict[str, Any]:
        """State, base learning rates, waiting commands in words, the last answer of the ranks, the newest command of
        each control."""
        acked = next((_acked(event) for event in reversed(self.feed.recent) if event["kind"] == "command"), None)
        waiting = self._waiting()
        return {
            "name": self.feed.paths.root.name,
            "state": self.feed.state,
            "step": self.feed.step,
            "ranks": self._world(),
            "rates": self._rates(),
            "waiting": [_text(entry) for entry in waiting[:MOST]],
            "acked": acked,
            "controls": self._controls(waiting),
        }

    def _rates(self) -> dict[str, dict[str, Any]]:
        now: Mapping[str, float] = self.feed.last.get("lr") or {}
        return {
            name: {"base": base, "now": now.get(name), "frozen": getattr(self.feed.plan.train, name).frozen}
            for name, base in self.feed.rates.items()
        }

    def _world(self) -> int:
        return int(self.feed.record.info.get("world_size", 0))

    def _waiting(self) -> list[dict[str, Any]]:
        found = [read_json(path) for path in sorted(self.feed.paths.control.glob("*.json"))]
        return [entry for entry in found if isinstance(entry, dict) and isinstance(entry.get("args", {}), dict)]

    def waiting(self) -> list[str]:
        """Commands, from anywhere, that wait for the next step boundary, in words."""
        return [_text(entry) for entry in self._waiting()]

    def _controls(self, waiting: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """The newest command of each control: {"id", "text", "source"} and "waits" (how many of its kind), or "ok",
        "step", "ranks", "of", "time", "message"."""
        found: dict[str, dict[str, Any]] = {}
        for entry in waiting:
            for control in controls_of(str(entry.get("verb")), entry.get("args") or {}):
                waits = found.get(control, {}).get("waits", 0) + 1
                told = {"id": str(entry.get("id", "")), "text": _text(entry), "source": str(entry.get("source", ""))}
                found[control] = told | {"waits": waits}
        world = self._world()
        moves = [event for event in self.feed.recent if event["kind"] == "relayout"]
        for event in sorted([*moves, *self.feed.commands], key=lambda event: event.get("t", 0.0), reverse=True):
            if event["kind"] == "relayout":
                world = int(event.get("before", world))  # what came earlier was answered by so many ranks
            else:
                for control in controls_of(str(event.get("verb")), event.get("args") or {}):
                    found.setdefault(control, _outcome(event, world))
        return found

    def handle(self, verb: str, args: dict[str, Any]) -> Any:
        """A button: the command in words and its id, once it is in the inbox. `check_relayout` sends nothing: it says
        what would change, in how many ranks."""
        run = self.source.run
        if verb == "check_relayout":
            return self._check(changes_of(str(args.get("changes", ""))))
        if verb == "step":
            sent = run.step(int(args.get("n", 1)))
        elif verb == "set":
            sent = run.set(str(args["key"]), float(args["value"]))
            args = {"values": {args["key"]: args["value"]}}
        elif verb == "checkpoint":
            sent = run.checkpoint(str(args.get("name", "")).strip())
        elif verb == "relayout":
            sent = run.relayout(*changes_of(str(args.get("changes", ""))))
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


def controls_of(verb: str, args: Mapping[str, Any]) -> list[str]:
    """The controls that show a command: its verb ("pause" also for resume), "rate vision" for a learning rate."""
    if verb == "set":
        values = args.get("values")
        parts = [str(key).split(".") for key in (values if isinstance(values, dict) else {})]
        return [f"rate {p[1]}" for p in parts if len(p) == 3 and p[0] == "train" and p[2] == "lr"]
    return ["pause" if verb == "resume" else verb]


def changes_of(text: str) -> list[str]:
    """Changes to a plan as typed, such as `parallel.tp=2, parallel.pp=1`, one by one. ValueError on anything else."""
    found = _CHANGE.findall(text)
    rest = _CHANGE.sub(" ", text).replace(",", " ").replace(";", " ").split()
    if rest or not found:
        what = repr(rest[0]) if rest else "nothing"
        raise ValueError(f"{what} is no change to the plan; write key=value, such as parallel.tp=2")
    return found


def _text(entry: Mapping[str, Any]) -> str:
    return command_text(str(entry.get("verb", "?")), entry.get("args") or {})


def _outcome(event: Event, world: int) -> dict[str, Any]:
    ranks = len(event.get("ranks") or [])
    return {
        "id": str(event.get("id", "")), "text": _text(event), "source": str(event.get("source", "")),
        "ok": bool(event.get("ok")), "step": event.get("step"), "ranks": ranks, "of": max(ranks, world),
        "time": clock(event), "message": str(event.get("message") or ""),
    }  # fmt: skip


def _acked(event: Event) -> dict[str, Any]:
    return {"text": event_text(event), "ok": bool(event.get("ok"))}
