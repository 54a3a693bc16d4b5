"""Where the panels of a lab look: at what its keeper wrote, and at the processes of this host."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from mmlab.cluster import registry
from mmlab.errors import MmlabError
from mmlab.messages import ENDED, RunPaths, read_json
from mmlab.tracking.record import RunRecord

FRESH = 0.4
"""Seconds for which a look is good for other views too."""
RUNS = 8
"""Newest runs of a lab that are told."""


class LabSource:
    """A lab and what is known of it: `status` and `info` as the lab's, `engines`, `runs`, `others` (live labs)."""

    def __init__(self, lab: Any) -> None:
        self.lab = lab
        self.lock = threading.RLock()
        self.status: dict[str, Any] = lab.status()
        self.info: dict[str, Any] = {}
        self.engines: list[dict[str, Any]] = []
        self.runs: list[dict[str, Any]] = []
        self.others: list[dict[str, Any]] = []
        self._records: dict[Path, RunRecord] = {}
        self._over: dict[Path, tuple[int, dict[str, Any]]] = {}
        self._processes: dict[int, psutil.Process] = {}
        self._looked = float("-inf")

    @property
    def state(self) -> str:
        """The lab's state."""
        return str(self.status["state"])

    @property
    def ended(self) -> bool:
        """Whether the lab is gone."""
        return self.state == "ended"

    @property
    def reading(self) -> float | None:
        """What its keeper wrote is read at once."""
        return None

    @property
    def cuts(self) -> int:
        """Nothing that was told is taken back."""
        return 0

    def look(self) -> None:
        """Read what the keeper wrote, ask the system about the processes of this host."""
        with self.lock:
            if time.monotonic() - self._looked < FRESH:
                return
            self.status = self.lab.status()
            self.info = self.lab.info() or ({} if self.ended else self.info)
            found = [self._run(Path(folder)) for folder in self.info.get("runs", [])[-RUNS:]]
            self.runs = [row for row in found if row]
            began = [row for row in self.runs if row["ranks"] or row["state"] not in ("queued", *ENDED)]
            ranks: list[Any] = began[-1]["ranks"] if began else []
            by_engine = {rank["engine"]: rank for rank in ranks}
            self.engines = [self._engine(up, by_engine.get(up["engine"], {})) for up in self.info.get("up", [])]
            self.others = self._others()
            self._looked = time.monotonic()

    def _run(self, folder: Path) -> dict[str, Any]:
        """A run's row; empty for one that was deleted. Of one that has ended nothing is read until its log grows."""
        try:
            size = RunPaths(folder).events.stat().st_size
            if folder in self._over and self._over[folder][0] == size:
                return self._over[folder][1]
            record = self._records.setdefault(folder, RunRecord(folder))
            status = record.status()
        except (MmlabError, OSError):
            return {}
        row = {"name": record.id, **{key: status[key] for key in ("state", "step", "steps", "reason", "ranks")}}
        if status["state"] in ENDED and not any(r["alive"] and r["phase"] != "idle" for r in status["ranks"]):
            self._over[folder] = (size, row)
        return row

    def _engine(self, up: dict[str, Any], rank: dict[str, Any]) -> dict[str, Any]:
        """An engine's row; memory (bytes), processor (percent of a core) and alive only where this host knows."""
        row = {**up, "memory": None, "cpu": None, "alive": None}
        row |= {key: rank.get(key) for key in ("rank", "role", "phase", "step")}
        if up["host"] != socket.gethostname():
            return row
        row["alive"] = False
        with contextlib.suppress(psutil.Error):
            if up["pid"] not in self._processes:
                self._processes[up["pid"]] = psutil.Process(up["pid"])
            process = self._processes[up["pid"]]
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                row |= {"alive": True, "memory": process.memory_info().rss, "cpu": round(process.cpu_percent(None))}
        return row

    def _others(self) -> list[dict[str, Any]]:
        found = [paths for paths in registry.live_labs() if paths.root.name != self.lab.id]
        return [registry.status(paths, read_json(paths.config) or {}) for paths in found]
