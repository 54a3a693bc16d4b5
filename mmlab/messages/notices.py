"""Notices that a host or a process is about to be taken away: small JSON files in `<run>/notices/`.

Whoever hears of it writes one (a signal handler, the watcher of a cloud's metadata, a person); rank 0's control thread
reads it, and all ranks obey at the same step boundary. What has been read is kept under another name.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from mmlab.messages.files import RunPaths, read_json, write_json

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""Signals that announce the end of a process: Kubernetes sends SIGTERM, Slurm what `--signal` says."""
CHAOS = "chaos"
"""Source of notices that `run.chaos` gives: the lab's keeper then ends the process, at the deadline."""
TAKEN = ".taken"
"""Suffix of notices that the run has obeyed."""


@dataclass(frozen=True)
class Notice:
    """One notice.

    `kind` "leave" (the host goes away, or the process `pid` on it alone) or "advice" (it may: save, and go on);
    `source` such as SIGTERM or aws; `deadline` seconds since the epoch, 0 for the plan's `cluster.grace` after `time`;
    `said` what the source said.
    """

    kind: str
    source: str
    host: str
    pid: int | None = None
    deadline: float = 0.0
    said: str = ""
    time: float = 0.0

    def about(self, host: str, pid: int, started: float = 0.0) -> bool:
        """Whether it is about a process (and not one that came after it, on a host that is back)."""
        return self.host == host and self.pid in (None, pid) and started <= self.time

    @property
    def where(self) -> str:
        """The host, and the process if it is about one alone."""
        return self.host if self.pid is None else f"process {self.pid} on {self.host}"


def write_notice(paths: RunPaths, notice: Notice) -> None:
    """Leave a notice for a run. OSError when its folder cannot be written."""
    paths.notices.mkdir(exist_ok=True)
    name = f"{time.time_ns():020d}-{os.getpid()}-{notice.source}.json"
    write_json(paths.notices / name, asdict(notice) | {"time": notice.time or time.time()})


def _read(path: Path) -> Notice | None:
    found = read_json(path)
    try:
        return Notice(**found) if isinstance(found, dict) else None
    except TypeError:  # not a notice
        return None


def take_notices(paths: RunPaths) -> Iterator[tuple[str, Notice]]:
    """Notices that nobody has obeyed yet, by name, oldest first; they count as obeyed from now on."""
    for path in sorted(paths.notices.glob("*.json")):
        notice = _read(path)
        os.replace(path, path.with_name(path.name + TAKEN))
        if notice is not None:
            yield path.stem, notice


def read_notices(paths: RunPaths) -> list[Notice]:
    """All notices that a run ever had."""
    found = [_read(path) for path in sorted(paths.notices.glob("*.json*"))]
    return [notice for notice in found if notice is not None]
