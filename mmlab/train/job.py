"""What a rank is told when a run starts on it. No torch: whoever starts runs imports this."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Job:
    """One rank's part of one generation of a run.

    `store_host` and `store_port` say where rank 0's TCPStore listens; `generation` counts starts of the run from 1;
    `restore` names the checkpoint to begin from, None for the beginning; `recovers` says that a keeper decides what
    becomes of a failure, so that no rank says that the run has failed.
    """

    run_dir: str
    rank: int
    world_size: int
    store_host: str = ""
    store_port: int = 0
    generation: int = 1
    restore: str | None = None
    recovers: bool = False

    def to_json(self) -> dict[str, Any]:
        """As JSON values; `Job(**value)` is the way back."""
        return asdict(self)
