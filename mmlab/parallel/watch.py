"""What a rank does right now, how long each phase took, and which ops ran when.

One object serves three readers: the beacon (seen from outside, even while the
rank hangs), the time per phase of a step, and the trace of chosen steps.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mmlab.messages import PHASES, Beacon
from mmlab.plan.ops import Op

_INDEX = {phase: index for index, phase in enumerate(PHASES)}


class Watch:
    """Times the phases of a step. `beacon` and `trace` (a JSONL file) may be None."""

    def __init__(self, beacon: Beacon | None = None, trace: Path | None = None, telemetry: bool = True) -> None:
        self.beacon = beacon
        self.trace = trace
        self.telemetry = telemetry
        self.fault: Callable[[int, str], None] | None = None
        """A scripted fault (tests): called with (step, phase) whenever a phase begins."""
        self.role = "" if beacon is None else beacon.role
        self.phase = "start"
        self.step = 0
        self.seconds = [0.0] * len(PHASES)
        self._ops: list[tuple[Op, float, float]] | None = None
        self._nested = 0.0
        self._began = time.perf_counter()
        self._epoch = time.time()

    def take_seconds(self) -> list[float]:
        """Seconds of each phase since they were last taken: whatever follows a step's own reduction (the update, a
        checkpoint) counts with the next step's."""
        taken, self.seconds = self.seconds, [0.0] * len(PHASES)
        return taken

    def begin_step(self, step: int, traced: bool) -> None:
        """Start a step and, when traced, record its ops."""
        self.step = step
        self._ops = [] if traced and self.trace is not None else None
        self._began, self._epoch = time.perf_counter(), time.time()
        if self.beacon is not None:
            self.beacon.step = step

    def enter(self, phase: str, microbatch: int = -1) -> None:
        """Say what happens from now on without timing it."""
        self.phase = phase
        if self.beacon is not None:
            self.beacon.update(phase, microbatch)
        if self.fault is not None:
            self.fault(self.step, phase)

    @contextmanager
    def timed(self, phase: str, op: Op | None = None) -> Iterator[None]:
        """Time a phase, without the time of phases nested in it; an `op` goes into the trace."""
        before, outer, self._nested = self.phase, self._nested, 0.0
        start = time.perf_counter()
        self.enter(phase, op.microbatch if op is not None else -1)
        yield  # after an exception the beacon and `phase` go on naming the phase that failed
        end = time.perf_counter()
        if self.telemetry:
            self.seconds[_INDEX[phase]] += end - start - self._nested
        self._nested = outer + end - start
        if self._ops is not None and op is not None:
            self._ops.append((op, start - self._began, end - self._began))
        self.enter(before)

    def background(self, op: Op, start: float, end: float) -> None:
        """Put into the trace what another thread did from `start` to `end` (`time.perf_counter`), beside the ops."""
        ops = self._ops
        if ops is not None:
            ops.append((op, max(0.0, start - self._began), end - self._began))

    def end_step(self) -> None:
        """Write the trace of a traced step."""
        if self._ops is None or self.trace is None:
            return
        ops = [[op.kind, op.microbatch, round(start, 6), round(end, 6), op.chunk] for op, start, end in self._ops]
        line = {"step": self.step, "t0": round(self._epoch, 6), "ops": ops}
        with contextlib.suppress(OSError), open(self.trace, "a") as file:  # a full disk costs a trace, not the run
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
        self._ops = None
