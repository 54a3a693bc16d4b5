"""The ranks' side of `run.chaos`: a fault that waits for a phase of a step, in the training thread."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mmlab.errors import PlanError
from mmlab.messages import PHASES
from mmlab.parallel.watch import Watch

COMPUTES = ("encode", "forward")
"""Where a fault without a phase strikes: at the first of these that its rank enters."""
DOZE = 0.05
"""Seconds that a hung rank sleeps at a time: an interrupt is raised in between."""


@dataclass
class Fault:
    """Strikes whenever a phase of a step begins; `slow` seconds at most once a step."""

    action: str
    seconds: float
    phase: str
    before: Callable[[int, str], None] | None
    """The fault that was there before."""
    last: int = -1

    def __call__(self, step: int, phase: str) -> None:
        """Strike if it is time to."""
        if self.before is not None:
            self.before(step, phase)
        if phase != self.phase and (self.phase or phase not in COMPUTES):
            return
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        while self.action == "hang":
            time.sleep(DOZE)
        if self.action == "slow" and step != self.last:
            self.last = step
            time.sleep(self.seconds)


class Chaos:
    """Faults of one rank that were asked for while the run goes on; they end with the generation."""

    def __init__(self, watch: Watch, rank: int, world_size: int) -> None:
        self.watch, self.rank, self.world_size = watch, rank, world_size
        self._own = watch.fault

    def act(self, args: dict[str, Any]) -> str:
        """Carry out {"action": kill | hang | slow, "rank", "seconds" (slow), "phase" ("": where it computes first)}."""
        action, rank, phase = args.get("action"), args.get("rank"), args.get("phase") or ""
        seconds = args.get("seconds", 0.0)
        if action not in ("kill", "hang", "slow") or (phase and phase not in PHASES):
            raise PlanError("chaos takes an action of kill, hang or slow, and a phase of a step")
        if not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise PlanError(f"there is no rank {rank!r}: the run has ranks 0 to {self.world_size - 1}")
        number = 0.0
        with contextlib.suppress(TypeError, ValueError):
            number = float(seconds)
        if rank == self.rank:
            slow = action != "slow" or number > 0
            self.watch.fault = Fault(action, number, phase, self._own) if slow else self._own
        where = phase or "where it computes"
        if action == "slow":
            return f"rank {rank}: {number:g} s more a step in {where}" if number > 0 else f"rank {rank} as before"
        return f"rank {rank} is to {'be killed' if action == 'kill' else 'hang'} in {where}"
