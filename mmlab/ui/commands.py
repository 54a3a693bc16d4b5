"""What has become of commands, whoever gave them: each control shows the newest of its kind."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mmlab.messages import Event, read_json
from mmlab.ui.words import clock, command_text


def waiting(feed: Any) -> list[dict[str, Any]]:
    """Commands in the inbox of a feed's run, from anywhere, oldest first."""
    found = [read_json(path) for path in sorted(feed.paths.control.glob("*.json"))]
    return [entry for entry in found if isinstance(entry, dict) and isinstance(entry.get("args", {}), dict)]


def world(feed: Any) -> int:
    """How many ranks the run has."""
    return int(feed.record.info.get("world_size", 0))


def newest(feed: Any, unanswered: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The newest command of each control: {"id", "verb", "text", "source"} and "waits" (how many of its kind), or "ok",
    "step", "ranks", "of", "time", "message"."""
    found: dict[str, dict[str, Any]] = {}
    for entry in unanswered:
        for control in controls_of(str(entry.get("verb")), entry.get("args") or {}):
            told = {"id": str(entry.get("id", "")), "verb": entry.get("verb"), "text": in_words(entry)}
            told["source"] = str(entry.get("source", ""))
            found[control] = told | {"waits": found.get(control, {}).get("waits", 0) + 1}
    ranks = world(feed)
    moves = [event for event in feed.recent if event["kind"] == "relayout"]
    for event in sorted([*moves, *feed.commands], key=lambda event: event.get("t", 0.0), reverse=True):
        if event["kind"] == "relayout":
            ranks = int(event.get("before", ranks))  # what came earlier was answered by so many ranks
            continue
        for control in controls_of(str(event.get("verb")), event.get("args") or {}):
            found.setdefault(control, _outcome(event, ranks))
    return found


def controls_of(verb: str, args: Mapping[str, Any]) -> list[str]:
    """The controls that show a command: its verb ("pause" also for resume), "rate vision" for a learning rate,
    "compress vision" for how a group's gradients are compressed."""
    if verb != "set":
        return ["pause" if verb == "resume" else verb]
    values = args.get("values")
    parts = [str(key).split(".") for key in (values if isinstance(values, dict) else {})]
    rates = [f"rate {p[1]}" for p in parts if len(p) == 3 and p[0] == "train" and p[2] == "lr"]
    groups = [f"compress {p[1]}" for p in parts if len(p) == 3 and p[0] == "communication"]
    return list(dict.fromkeys([*rates, *groups]))


def in_words(entry: Mapping[str, Any]) -> str:
    """A command as a person would give it."""
    return command_text(str(entry.get("verb", "?")), entry.get("args") or {})


def _outcome(event: Event, world: int) -> dict[str, Any]:
    ranks = len(event.get("ranks") or [])
    return {
        "id": str(event.get("id", "")), "verb": event.get("verb"), "text": in_words(event),
        "source": str(event.get("source", "")),
        "ok": bool(event.get("ok")), "step": event.get("step"), "ranks": ranks, "of": max(ranks, world),
        "time": clock(event), "message": str(event.get("message") or ""),
    }  # fmt: skip
