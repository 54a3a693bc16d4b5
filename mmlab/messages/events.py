"""The event log: `<run>/events.jsonl`, append-only, one JSON object a line.

Kinds and what they carry beside `t` (seconds since the epoch), `kind`, `lineage`, `step`:

- `state`: state (queued, starting, running, paused, failed, finished, stopped), reason; for running: `ranks`; for
  failed: `cause` (a failure's kind), rank, role, phase, log
- `lineage`: id, parent (lineage or ""), parent_step: where the lineage branches off
- `step`: loss, tokens, images, samples, seconds, tokens_per_s, images_per_s, data_wait, lr {module: x}, grad_norm
  {module: x}, grad_norm_total, phases [[seconds of each phase in `messages.PHASES`] for each rank] with telemetry on
- `command`: id, verb, args, ok, ranks, message
- `checkpoint`: name, path, seconds, bytes; `restore`: name, from_step
- `eval`: loss, loss_swapped (null without images), tokens; `samples`: folder, items [{image, truth, text, prompt}]
- `bad_image`: sample, reason; `warning`: message
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Event = dict[str, Any]


class EventLog:
    """Appends events; each line is one `write` to a file opened for append, so processes do not mix lines."""

    def __init__(self, path: Path, lineage: str = "") -> None:
        self.path = path
        self.lineage = lineage
        self._lock = threading.Lock()
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def emit(self, kind: str, **fields: Any) -> Event:
        """Append one event and return it."""
        event: Event = {"t": round(time.time(), 4), "kind": kind, "lineage": self.lineage, **fields}
        line = (json.dumps(event, separators=(",", ":")) + "\n").encode()
        with self._lock:
            os.write(self._file, line)
        return event

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)


def _parse(line: bytes) -> Event | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None  # a line cut by a crash of the machine: the next one is whole again
    return event if isinstance(event, dict) else None


def read_events(path: Path, offset: int = 0, limit: int = -1) -> tuple[list[Event], int]:
    """Whole lines from a byte offset on, and the offset after them. No file: none.

    `limit` is the most bytes to read at once (-1: all); it must be larger than a line.
    """
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read(limit)
    except FileNotFoundError:
        return [], offset
    end = data.rfind(b"\n") + 1
    events = [event for line in data[:end].splitlines() if (event := _parse(line)) is not None]
    return events, offset + end


def follow_events(path: Path, poll: float = 0.1, stop: threading.Event | None = None) -> Iterator[Event]:
    """All events, then new ones as they come, until `stop` is set. `poll` in seconds."""
    offset = 0
    while True:
        events, offset = read_events(path, offset)
        yield from events
        if stop is not None and stop.is_set():
            return
        if not events:
            time.sleep(poll)
