"""The events of a run but those of its steps: few, however long the run, so that looking at them again costs little."""

from __future__ import annotations

import re
import threading
from pathlib import Path

from mmlab.messages.events import Event, parse_event

READ = 1 << 22
"""Bytes of the log that are held at once."""
_STEP = re.compile(rb'\{"t":[^,]*,"kind":"step","lineage":"([^"]*)","step":(\d+)[,}]')


class Rare:
    """Follows an event log. Steps are counted and not kept: of a hundred thousand they would take a gigabyte. Any
    thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._offset = 0
        self._events: list[Event] = []
        self._last: dict[str, int] = {}
        self._newest = b""

    def events(self) -> list[Event]:
        """All events but those of steps, oldest first."""
        with self._lock:
            self._read()
            return list(self._events)

    def last(self) -> dict[str, int]:
        """The last step of each lineage that has done one."""
        with self._lock:
            self._read()
            return dict(self._last)

    def newest_step(self) -> Event | None:
        """The last event of a step, of any lineage; None before the first."""
        with self._lock:
            self._read()
            return parse_event(self._newest) if self._newest else None

    def _read(self) -> None:
        try:
            with open(self.path, "rb") as file:
                while True:
                    file.seek(self._offset)
                    data = file.read(READ)
                    end = data.rfind(b"\n") + 1
                    if end == 0:
                        return
                    for line in data[:end].splitlines():
                        self._take(line)
                    self._offset += end
        except FileNotFoundError:
            return

    def _take(self, line: bytes) -> None:
        found = _STEP.match(line)
        if found is not None:
            self._last[found[1].decode()], self._newest = int(found[2]), line
            return
        event = parse_event(line)
        if event is not None and event.get("kind") == "step":  # written by other hands
            self._last[str(event.get("lineage", ""))], self._newest = int(event["step"]), line
        elif event is not None:
            self._events.append(event)
