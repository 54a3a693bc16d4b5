"""Which processes belong to a lab, and ending all of them: children of a killed controller and nannies included."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from mmlab.messages.files import process_alive

MARK = "MMLAB_LAB"
"""Environment variable with the lab's id: whatever a lab starts inherits it, so its orphans can be found."""
GRACE = 1.0
"""Seconds between asking processes to end and killing them."""


@dataclass(frozen=True)
class Tracked:
    """A process of this host that a lab started; `started` (seconds since the epoch) tells it from a later namesake."""

    pid: int
    started: float
    kind: str

    @property
    def alive(self) -> bool:
        """Whether this very process lives."""
        return process_alive(self.pid, self.started)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def tracked(process: psutil.Process, kind: str) -> Tracked | None:
    """A record of a living process; None when it is gone."""
    try:
        return Tracked(process.pid, process.create_time(), kind)
    except psutil.Error:
        return None


def with_descendants(roots: Iterable[Tracked]) -> list[Tracked]:
    """The living ones of these processes and all that they started, in one look at the process table."""
    found = {root.pid: root for root in roots if root.alive}
    children: dict[int, list[psutil.Process]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            children.setdefault(process.ppid(), []).append(process)
    pending = list(found.values())
    while pending:
        parent = pending.pop()
        for child in children.get(parent.pid, []):
            kind = parent.kind if parent.kind.startswith("child of ") else f"child of {parent.kind}"
            record = tracked(child, kind)
            if record and record.pid not in found:
                found[record.pid] = record
                pending.append(record)
    return list(found.values())


def marked(lab_id: str) -> Iterator[Tracked]:
    """Living processes of this user that carry the lab's mark, this process excepted; none for an empty id."""
    for process in psutil.process_iter():
        if process.pid == os.getpid() or not lab_id:
            continue
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(MARK) == lab_id:
                record = tracked(process, "orphan")
                if record and record.alive:
                    yield record


def end_all(records: Iterable[Tracked], lab_id: str, grace: float = GRACE) -> list[Tracked]:
    """End these processes, what they started and whatever carries the lab's mark ("": no mark): SIGTERM, then SIGKILL.

    Returns those that live on (of another user, or in an uninterruptible call).
    """
    listed = list(records)
    targets = {record.pid: record for record in [*with_descendants(listed), *marked(lab_id)]}
    _signal(targets.values(), "terminate")
    _wait(targets.values(), grace)
    for record in [*with_descendants(listed), *marked(lab_id)]:  # what was started meanwhile
        targets.setdefault(record.pid, record)
    _signal(targets.values(), "kill")
    _wait(targets.values(), 5.0)
    return [record for record in targets.values() if record.alive]


def _signal(records: Iterable[Tracked], how: str) -> None:
    for record in records:
        if record.alive and record.pid != os.getpid():
            with contextlib.suppress(psutil.Error):
                getattr(psutil.Process(record.pid), how)()


def _wait(records: Iterable[Tracked], timeout: float) -> None:
    end = time.monotonic() + timeout
    while any(record.alive for record in records) and time.monotonic() < end:
        time.sleep(0.05)
