"""The event log: `<run>/events.jsonl`, append-only, one JSON object a line.

Kinds and what they carry beside `t` (seconds since the epoch), `kind`, `lineage`, `step`:

- `state`: state (queued, starting, running, paused, failed, finished, stopped), reason; for running: `ranks`,
  `transport` (what they talk through); for failed: `cause` (a failure's kind), rank, role, phase, log
- `lineage`: id, parent (lineage or ""), parent_step: where the lineage branches off
- `step`: balance {tokens (of the fullest microbatch of all replicas over their mean), images (tiles of the encoding
  rank with most over their mean, null without), with data.bucket_window unbucketed {tokens, images, total (tokens): of
  the step as it would be without}, over (tokens that the fullest microbatch has more than data.token_budget)},
  loss, tokens, images, samples, seconds, tokens_per_s, images_per_s, data_wait, lr {module: x}, grad_norm
  {module: x}, grad_norm_total (null where not finite), reduced ("momentum" in steps of 1-bit Adam after its freeze: the
  norms are then those of the first moment, for nobody has the gradient), loss_scale (with fp16), with telemetry on
  data_queue (steps decoded and waiting when the step asked for the next one, on the rank that had fewest: at 0 it had
  to wait), phases [[seconds of each phase in `messages.PHASES`] for each rank], traffic {axis of `messages.AXES`:
  [bytes of each group of the layout]} and communication {module: {seconds, exposed}} of its gradients under way and
  waited for, and of each module whose gradients are compressed, or of which something is still left out, compression
  {module: {compressor, options {name: value}, seconds (coding, on the slowest rank), residual (norm of what all ranks
  have left out so far, null where not finite), dense (bytes that its ranks would hand over without), kept
  (bytes that they keep between steps), and in a measured step error (||reduced - dense|| / ||dense||)}}
- `command`: id, verb, args, ok, ranks, message
- `checkpoint`: once it is complete, which for one written in the background is some steps later than its step: name,
  path, seconds (from the boundary to the manifest), stall (seconds for which the run was held up), bytes,
  shared_bytes (of frozen modules that it refers to), periodic, reason (command, end, every N steps, ...)
- `restore`: name, from_step, values {live key: as saved}
- `recovery`, twice for each: done (false when it begins, true when the next generation has done its first step),
  reason (the failure in a sentence), cause (a failure's kind), rank, role, phase, attempt k of (`of`) n, generation
  (the one that follows), restore (the checkpoint asked for, null for the beginning), evidence (what the doctor saw of a
  hung rank, else empty); when done also replaced (engines that took the place of others, by rank) and seconds from
  the failure to the end of that step
- `relayout`: the run goes on in another layout: name (of the state that it took up), changes {key: [before, after]},
  before and after (ranks), generation, through ("memory" or "disk"), bytes, seconds (from the step boundary until the
  state was taken up), steps (planned)
- `notice`: a host or process is about to be taken away: notice ("leave" or "advice"), source, host, pid (null for the
  whole host), deadline (seconds since the epoch), said, ranks (that are there), saved (name of a checkpoint, empty
  where there was no time for one), message
- `eval`: loss, loss_swapped (null without images), tokens; `samples`: folder, items [{image, truth, text, prompt}]
- `balance`: times {part: seconds}, layers_per_stage (the split chosen from them), seconds and even [of each rank of a
  pipeline, with that and with an even split]
- `bad_image`: sample, reason; `warning`: message
- `overflow`: a step of which the update was left out; modules (those whose gradients left fp16's range, "loss" if the
  loss did), loss_scale (the one that the next step takes)
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from mmlab.messages.files import whole

Event = dict[str, Any]
TAIL = 1 << 18
"""Bytes at the end of a log in which its last state is looked for: a run that has ended writes nothing more."""
ENDED = ("failed", "finished", "stopped", "deleted")
"""States in which a run no longer computes; "deleted" is told by no event but by a folder that is gone."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What a disk answers that is full, or full for this user or this file."""
NEEDED: Mapping[str, Mapping[str, type]] = {
    "state": {"state": str},
    "lineage": {"id": str, "parent": str, "parent_step": int},
    "step": {"step": int, "lineage": str},
    "command": {"step": int, "verb": str, "args": dict, "ok": bool},
    "checkpoint": {"step": int},
    "restore": {"values": dict},
    "relayout": {"step": int, "steps": int, "lineage": str},
}
"""Fields without which an event of a kind is none: what says where a run stands is read by the ranks themselves, so one
foreign line must not end a run."""
MOST_KEPT = 1 << 22
"""Bytes of events that wait for room on a full disk: those of some thousand steps."""


class EventLog:
    """Appends events; each line is one `write` to a file opened for append, so processes do not mix lines.

    A line that a crash or a full disk has cut short is ended first, so that it costs no other one. What a full disk
    does not take is kept and written with a later event, in order: room comes back when a save that filled it fails.
    """

    def __init__(self, path: Path, lineage: str = "") -> None:
        self.path = path
        self.lineage = lineage
        self._lock = threading.Lock()
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(self._file).st_size
        self._kept: list[bytes] = []
        self._cut = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"

    def emit(self, kind: str, **fields: Any) -> Event:
        """Append one event and return it. OSError when the disk has been full for MOST_KEPT bytes."""
        event: Event = {"t": round(time.time(), 4), "kind": kind, "lineage": self.lineage, **fields}
        line = (json.dumps(event, separators=(",", ":")) + "\n").encode()
        with self._lock:
            self._kept.append(line)
            self._write()
            if sum(map(len, self._kept)) > MOST_KEPT:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        return event

    def _write(self) -> None:
        """Write what is kept, as far as the disk takes it."""
        while self._kept:
            line = b"\n" + self._kept[0] if self._cut else self._kept[0]
            try:
                done = os.write(self._file, line)
            except OSError as error:
                if error.errno in FULL:
                    return
                raise
            self._cut = done < len(line)
            if self._cut:
                return
            del self._kept[0]

    def close(self) -> None:
        """Write what is kept, if there is room by now, and close the file."""
        with self._lock:
            self._write()
            os.close(self._file)


def parse_event(line: bytes) -> Event | None:
    """The event of a line; None for one that was cut, or that is none."""
    try:
        event = from_json(line, cache_strings="all")  # 5 us for a step of three ranks, where json.loads takes 21
    except ValueError:
        event = _lenient(line)
    if not isinstance(event, dict) or not isinstance(event.get("kind"), str) or not _is_time(event.get("t")):
        return None
    for name, kind in NEEDED.get(event["kind"], {}).items():
        if not isinstance(event.get(name), kind):
            return None
    return event


def _lenient(line: bytes) -> Any:
    """What Python's own reader, which writes the lines, takes beyond the fast one: halves of surrogate pairs, a
    byte-order mark, deep nesting."""
    try:
        return whole(json.loads(line))
    except (ValueError, RecursionError):
        return None  # a line cut by a crash or a full disk, or nested without end


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < float("inf")


def read_events(path: Path, offset: int = 0, limit: int = -1) -> tuple[list[Event], int]:
    """Events of whole lines from a byte offset on, and the offset after them. `limit` as of `read_lines`."""
    lines, after = read_lines(path, offset, limit)
    return [event for line in lines if (event := parse_event(line)) is not None], after


def read_lines(path: Path, offset: int = 0, limit: int = -1) -> tuple[list[bytes], int]:
    """Whole lines from a byte offset on, and the offset after them. No file: none.

    `limit` is the most bytes to read at once (-1: all), more only where a line is longer.
    """
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read(limit)
            while (end := data.rfind(b"\n") + 1) == 0 and (more := file.read(limit)):
                data += more
    except FileNotFoundError:
        return [], offset
    return data[:end].splitlines(), offset + end


def last_events(path: Path) -> list[Event]:
    """The events at the end of a log, read without the rest; a log of any length takes two milliseconds."""
    size = path.stat().st_size if path.exists() else 0
    return read_events(path, max(0, size - TAIL))[0]


def lines_back(path: Path, piece: int = TAIL) -> Iterator[bytes]:
    """Whole lines of a log, the last one first, read from its end in pieces of so many bytes. No file: none."""
    return islice(_parts_back(path, piece), 1, None)  # what follows the last line's end is still being written


def _parts_back(path: Path, piece: int) -> Iterator[bytes]:
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        start, begun = file.seek(0, os.SEEK_END), b""
        while start > 0:
            size = min(piece, start)
            start -= size
            file.seek(start)
            begun, *parts = (file.read(size) + begun).split(b"\n")
            yield from reversed(parts)
        yield begun


def last_of(events: list[Event], kind: str) -> Event:
    """The last event of a kind; {} where there is none."""
    return next((event for event in reversed(events) if event["kind"] == kind), {})


def last_state(path: Path) -> str:
    """The state in the last `state` event among the end of a log; empty where there is none."""
    return str(last_of(last_events(path), "state").get("state", ""))


def last_steps(lineages: list[Event]) -> dict[str, float]:
    """The last step of each of these lineages (newest first, as `RunRecord.lineages`) that no restore has taken back:
    infinite for the current one."""
    last: dict[str, float] = {}
    cut = float("inf")
    for lineage in lineages:
        last[lineage["id"]] = cut
        cut = min(cut, lineage["parent_step"])
    return last


def live_values(values: dict[str, Any], event: Event) -> dict[str, Any]:
    """Live fields of the plan as they stand after an event, from how they stood before it: {dotted key: value}."""
    if event["kind"] == "restore":
        return values | event["values"]
    if event["kind"] == "relayout":
        return {}  # they are in the plan that it has written
    if event["kind"] == "command" and event["verb"] == "set" and event["ok"]:
        return values | event["args"].get("values", {})
    return values


def planned_steps(events: list[Event], default: int) -> int:
    """Planned steps of a run with what `set` made of them; `default` is the plan's own number."""
    for event in reversed(events):
        if event["kind"] == "relayout":
            return int(event["steps"])
        if event["kind"] == "command" and event.get("ok") and event["verb"] == "set":
            values = event["args"].get("values", {})
            if "train.steps" in values:
                return int(values["train.steps"])
    return default
