"""Where a run keeps what, and writing files that are either whole or absent."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil


@dataclass(frozen=True)
class RunPaths:
    """The folder of one run.

    `plan.toml` the plan, `run.json` id, lab and generation, `events.jsonl` the append-only truth, `ledger.jsonl` the
    samples that each step consumed, `control/` the inbox (mode 0700) with `control/acks/`, `ranks/` one beacon a rank,
    `failures/` one file a failed rank and generation, `logs/` what ranks print, `checkpoints/`, `traces/` op times of
    chosen steps, `plans/` the plans of earlier generations where a relayout changed them, `relayout.json` a state
    on its way to another layout or to other engines, `plan.full.toml` the plan of a run that lacks engines for it,
    `notices/` hosts that are about to be taken away.
    """

    root: Path

    @property
    def plan(self) -> Path:
        """The plan, TOML."""
        return self.root / "plan.toml"

    @property
    def plans(self) -> Path:
        """Plans of earlier generations, TOML."""
        return self.root / "plans"

    @property
    def full_plan(self) -> Path:
        """The plan of a run that goes on in a smaller layout while engines are lacking, TOML; else absent."""
        return self.root / "plan.full.toml"

    @property
    def notices(self) -> Path:
        """Notices that a host is about to be taken away, one file each."""
        return self.root / "notices"

    @property
    def move(self) -> Path:
        """The state on its way to the next generation (JSON); absent but for that moment."""
        return self.root / "relayout.json"

    @property
    def run(self) -> Path:
        """Id, time of creation, lab, generation (JSON)."""
        return self.root / "run.json"

    @property
    def events(self) -> Path:
        """Append-only event log, one JSON object a line."""
        return self.root / "events.jsonl"

    @property
    def ledger(self) -> Path:
        """Append-only ledger of the samples that each step consumed, one JSON object a line."""
        return self.root / "ledger.jsonl"

    @property
    def control(self) -> Path:
        """Inbox of commands."""
        return self.root / "control"

    @property
    def acks(self) -> Path:
        """Answers to commands."""
        return self.root / "control" / "acks"

    @property
    def ranks(self) -> Path:
        """Beacons, one file a rank."""
        return self.root / "ranks"

    @property
    def failures(self) -> Path:
        """Failure records, a folder a generation."""
        return self.root / "failures"

    @property
    def logs(self) -> Path:
        """What ranks print."""
        return self.root / "logs"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints, a folder each."""
        return self.root / "checkpoints"

    @property
    def traces(self) -> Path:
        """Op times of traced steps, one file a rank."""
        return self.root / "traces"

    @property
    def samples(self) -> Path:
        """Held-out pictures with what the model wrote, a folder each evaluation."""
        return self.root / "samples"

    def log(self, rank: int) -> Path:
        """What one rank prints."""
        return self.logs / f"rank-{rank}.log"

    def create(self) -> None:
        """Make the folder and what is in it; OSError when it cannot be written."""
        self.root.mkdir(parents=True, exist_ok=True)
        self.control.mkdir(mode=0o700, exist_ok=True)
        for folder in (self.acks, self.ranks, self.failures, self.logs, self.checkpoints, self.traces, self.samples):
            folder.mkdir(exist_ok=True)


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file that is whole or absent: to a temporary name, flushed, then renamed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write JSON atomically."""
    write_atomic(path, json.dumps(value, indent=1).encode())


def read_json(path: Path) -> Any | None:
    """The JSON of a file; None where it does not exist or is not JSON."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):  # the last: nested without end
        return None


def whole(value: Any) -> Any:
    """A JSON value without halves of surrogate pairs: no UTF-8 holds them, so no page, pipe or file takes a text with
    one. Each is a replacement character in what comes back."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {whole(key): whole(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [whole(item) for item in value]
    return value


def process_started(pid: int) -> float:
    """When a process started, seconds since the epoch; 0 when there is none."""
    try:
        return float(psutil.Process(pid).create_time())
    except (psutil.Error, ValueError):
        return 0.0


def process_alive(pid: int, started: float | None = None) -> bool:
    """Whether a process of this host lives (a zombie does not) and is the one that started then (pids are reused)."""
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        return started is None or abs(process.create_time() - started) < 2.0
    except (psutil.Error, ValueError):
        return False
