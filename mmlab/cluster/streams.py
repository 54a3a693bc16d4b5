"""Where output of an engine goes: what training prints to the rank's log, all else to the cell that caused it.

Printed lines of a training thread would otherwise travel to the client, land
under whichever cell ran last on that engine, and stay in the client's memory.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from pathlib import Path
from typing import Any

from ipykernel.iostream import OutStream

MAX_BYTES = 5_000_000
"""Size at which a rank's log is rotated, in bytes."""
BACKUPS = 2
"""Rotated parts kept beside the current one: rank-N.log.1 is newer than rank-N.log.2."""


class RankLog:
    """A file that is rotated, so that a talkative rank fills neither the disk nor any memory.

    Every write is one system call: what was printed before a kill -9 is in the file.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_BYTES, backups: int = BACKUPS) -> None:
        self.path = path
        self.max_bytes = max_bytes
        self.backups = backups
        self._lock = threading.Lock()
        self._open()

    def _open(self) -> None:
        self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        self._size = os.fstat(self._file).st_size

    def write(self, data: bytes) -> None:
        """Append, rotating first when the file would grow beyond its limit. A full disk loses the text, nothing else:
        who prints (a rank that is about to say that it failed, say) goes on."""
        with self._lock, contextlib.suppress(OSError):
            if self._size and self._size + len(data) > self.max_bytes:
                self._rotate()
            self._size += os.write(self._file, data)

    def _rotate(self) -> None:
        os.close(self._file)
        names = [self.path] + [self.path.with_name(f"{self.path.name}.{n}") for n in range(1, self.backups + 1)]
        for older, newer in zip(reversed(names[1:]), reversed(names[:-1]), strict=True):
            if newer.exists():
                os.replace(newer, older)
        self._open()

    def close(self) -> None:
        """Close the file. What a thread prints later is lost."""
        with self._lock:
            os.close(self._file)
            self._file = -1  # the number is soon another file's


class EngineStream(OutStream):
    """stdout or stderr of an engine (ipyparallel's `IPEngine.out_stream_factory`).

    While a run is active, text from the training thread and from threads started after it goes to the rank's log, and
    so does what C++ libraries and child processes write to the descriptor. All other text goes to the client as usual.
    A thread that a cell starts while a run is active cannot be told from one of the run's and counts as the run's.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._rank_log: RankLog | None = None
        self._others: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        super().__init__(*args, **(kwargs | {"watchfd": "force"}))

    def route(self, log: RankLog) -> None:
        """Send what threads that do not exist yet print to this log."""
        self._others = weakref.WeakSet(threading.enumerate())
        self._rank_log = log

    def unroute(self) -> None:
        """Send everything to the client again."""
        self._rank_log = None

    def write(self, string: str) -> int:
        """Write text, to the rank's log or to the client, by the thread that asks."""
        log = self._rank_log
        if log is not None and threading.current_thread() not in self._others:
            log.write(string.encode(errors="replace"))
            return len(string)
        return super().write(string) or 0

    def flush(self) -> None:
        """Send what is buffered; the log needs none."""
        if self._rank_log is None or threading.current_thread() in self._others:
            super().flush()

    def _watch_pipe_fd(self) -> None:
        """Pass on what reaches the descriptor: to the rank's log, or to the engine's own log; never to a cell."""
        while data := os.read(self._fid, 65536):
            if not self._should_watch:
                return
            log = self._rank_log
            if log is not None:
                log.write(data)
            else:
                os.write(self._original_stdstream_copy, data)
