"""What the keeper knows of one engine, and the error that it was lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mmlab.errors import LabError
from mmlab.messages.notices import Notice


@dataclass(frozen=True)
class EngineInfo:
    """One engine: ipyparallel's id, and its process; `local` where this host can see that process."""

    id: int
    pid: int
    started: float
    host: str
    local: bool

    def leaving(self, notices: Sequence[Notice]) -> bool:
        """Whether it is about to be taken away: it gets no rank."""
        return any(notice.about(self.host, self.pid, self.started) for notice in notices)


class EngineLost(LabError):
    """An engine's process ended while it was asked for something."""

    def __init__(self, engine: EngineInfo, what: str) -> None:
        super().__init__(f"engine {engine.id} (pid {engine.pid} on {engine.host}) {what}")
        self.engine = engine
