"""Buttons to verbs: what a view asks for becomes a verb of the run.

Verbs write a command file and return, so this never waits and is right on any
thread (ipykernel 7.3 ran callbacks on a subshell's thread, 7.4 on the main one).
"""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from typing import Any, Protocol

from mmlab.errors import MmlabError
from mmlab.messages import RunPaths, read_json
from mmlab.ui.words import command_text


class Steerable(Protocol):
    """The verbs of a run, as `mmlab.lab.Run` has them."""

    def pause(self) -> Any:
        """Pause after the step under way."""

    def resume(self) -> Any:
        """Go on."""

    def step(self, n: int = 1) -> Any:
        """Run n steps, then pause."""

    def stop(self) -> Any:
        """End the run."""

    def abort(self) -> Any:
        """End the run at once."""

    def checkpoint(self) -> Any:
        """Save."""

    def set(self, key: str, value: Any) -> Any:
        """Change a live value of the plan."""


class Controls:
    """Turns messages of views into verbs and remembers which were heard and which were refused at once."""

    def __init__(self, run: Steerable, run_dir: Path) -> None:
        self._run = run
        self._control = RunPaths(run_dir).control
        self._heard: deque[dict[str, Any]] = deque(maxlen=20)
        self._lock = threading.Lock()

    def handle(self, message: dict[str, Any]) -> None:
        """Carry out a view's command. Refusals are kept for the views, never raised into the comm channel."""
        token, verb, args = message.get("token"), message.get("verb"), message.get("args") or {}
        try:
            self._apply(str(verb), args)
            refusal = ""
        except (MmlabError, ValueError, TypeError) as error:
            refusal = str(error)
        text = command_text(
            str(verb), {"values": {args["key"]: args.get("value")}} if verb == "set" and "key" in args else args
        )
        with self._lock:
            self._heard.append({"token": token, "text": text, "refusal": refusal})

    def heard(self) -> list[dict[str, Any]]:
        """The last commands of views that arrived: token, text, refusal (empty when it was passed on)."""
        with self._lock:
            return list(self._heard)

    def waiting(self) -> list[str]:
        """Commands, from anywhere, that wait for the next step boundary, in words."""
        found = [read_json(path) for path in sorted(self._control.glob("*.json"))]
        return [
            command_text(entry.get("verb", "?"), entry.get("args") or {}) for entry in found if isinstance(entry, dict)
        ]

    def _apply(self, verb: str, args: dict[str, Any]) -> None:
        if verb == "step":
            self._run.step(int(args.get("n", 1)))
        elif verb == "set":
            self._run.set(str(args["key"]), float(args["value"]))
        elif verb in ("pause", "resume", "stop", "abort", "checkpoint"):
            getattr(self._run, verb)()
        else:
            raise ValueError(f"unknown command {verb!r}")
