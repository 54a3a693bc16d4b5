"""Failure records: one file a failed rank, so that survivors and faces agree on who failed first and why."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

from mmlab.messages.control import Command
from mmlab.messages.files import read_json, write_json


@dataclass(frozen=True)
class Failure:
    """Why a rank left the run.

    `kind` is "input" (the user's plan, data or checkpoint), "exception" (its own fault), "memory" (out of memory),
    "lost" (process gone), "hung" (others wait for it; written by the keeper) or "peer" (a collective broke because
    another rank left); `message` one line; `details` a traceback, what the doctor saw of a hung rank, or empty.
    """

    rank: int
    role: str
    phase: str
    step: int
    kind: str
    message: str
    details: str = ""
    time: float = 0.0

    def sentence(self) -> str:
        """The failure in one sentence; what the user's input is at fault for says so itself, alike on every rank."""
        if self.kind == "input":
            return self.message
        what = "its process ended" if self.kind == "lost" else self.message
        return f"rank {self.rank} ({self.role}) failed in {self.phase} of step {self.step}: {what}"


def write_failure(failures: Path, generation: int, failure: Failure) -> None:
    """Record a failed rank of a generation of the run."""
    folder = failures / f"generation-{generation}"
    folder.mkdir(parents=True, exist_ok=True)
    record = asdict(failure) | {"time": failure.time or time.time()}
    write_json(folder / f"rank-{failure.rank}.json", record)


def read_failures(failures: Path, generation: int) -> list[Failure]:
    """Failures of a generation, those with a cause of their own first, then by time."""
    found = [read_json(path) for path in (failures / f"generation-{generation}").glob("rank-*.json")]
    records = [Failure(**record) for record in found if record]
    return sorted(records, key=lambda failure: (failure.kind == "peer", failure.time))


def write_aborted(failures: Path, generation: int, command: Command) -> None:
    """Record that a generation was aborted, before any rank is freed: the others then know why they are."""
    folder = failures / f"generation-{generation}"
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "aborted.json", asdict(command))


def read_aborted(failures: Path, generation: int) -> Command | None:
    """The command that aborted a generation; None where there is none."""
    found = read_json(failures / f"generation-{generation}" / "aborted.json")
    return Command(**found) if isinstance(found, dict) else None


def claim_report(failures: Path, generation: int) -> bool:
    """Whether the caller is the one to append the `state failed` event of this generation (the first to ask is)."""
    folder = failures / f"generation-{generation}"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        (folder / "reported").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
