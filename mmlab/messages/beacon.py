"""Beacons: what a rank is doing right now, readable from outside while it hangs or after it died.

One fixed-size record in a mapped file: updating it is a memory write (about a
microsecond), so every op of the schedule can say that it began.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from mmlab.messages.files import process_started

PHASES = ("start", "data", "encode", "forward", "backward", "exchange", "pipeline", "reduce", "optimizer", "eval",
          "checkpoint", "control", "idle")  # fmt: skip
"""What a rank can be doing. `exchange` moves image tokens and their gradients, `pipeline` waits for or moves
activations between stages, `reduce` reduces gradients and norms, `control` is the step boundary (a pause too)."""

AXES = ("tp", "cp", "cp_skipped", "pp", "tokens", "vision", "projector", "language", "sharding", "embedding")
"""What communication is for: tensor and context parallel (`cp_skipped`: what a ring of whole blocks would have sent
beyond that and no query sees), activations between stages, image tokens and their
gradients, gradients of each module, parameters and gradients that are sharded, the tied table."""

LEFT = 5.0
"""Seconds in which the last state of a run whose ranks have all left is written."""
LEFT_UNSAID = "its ranks have left and could not say why (a full disk?)"
"""Why a run without a last state has failed."""

_RECORD = struct.Struct("<4sIIdqIiIId32s64s")
_MAGIC = b"MMB1"


@dataclass(frozen=True)
class BeaconState:
    """One rank's beacon.

    `step` the step under way (1 is the first), `phase` from PHASES, `microbatch` its index or -1, `updated` seconds
    since the epoch, `role` such as "vision 0" or "stage 1 tp 0 dp 0".
    """

    rank: int
    pid: int
    started: float
    step: int
    phase: str
    microbatch: int
    generation: int
    done: bool
    updated: float
    role: str
    host: str


class Beacon:
    """A rank's own beacon, written by that rank only."""

    def __init__(self, path: Path, rank: int, role: str, host: str, generation: int) -> None:
        pid = os.getpid()
        self._fixed = (_MAGIC, rank, pid, process_started(pid))
        self._tail = (role.encode()[:32], host.encode()[:64])
        self.role = role
        self.generation = generation
        self.step = 0
        with open(path, "wb+") as file:
            file.truncate(_RECORD.size)
            self._map = mmap.mmap(file.fileno(), _RECORD.size)
        self.update("start")

    def update(self, phase: str, microbatch: int = -1, done: bool = False) -> None:
        """Say what this rank does from now on."""
        record = (self.step, PHASES.index(phase), microbatch, self.generation, int(done), time.time())
        _RECORD.pack_into(self._map, 0, *self._fixed, *record, *self._tail)

    def close(self) -> None:
        """Mark the rank as done and unmap the file."""
        if not self._map.closed:
            self.update("idle", done=True)
            self._map.close()


def read_beacons(ranks: Path) -> list[BeaconState]:
    """All beacons of a run in rank order; files that are not beacons are passed over."""
    states = []
    for path in ranks.glob("rank-*.beacon"):
        try:
            data = path.read_bytes()
        except OSError:
            continue
        if len(data) != _RECORD.size or data[:4] != _MAGIC:
            continue
        _, rank, pid, started, step, phase, microbatch, generation, done, updated, role, host = _RECORD.unpack(data)
        states.append(
            BeaconState(rank, pid, started, step, PHASES[phase], microbatch, generation, bool(done), updated,
                        role.rstrip(b"\0").decode(), host.rstrip(b"\0").decode())
        )  # fmt: skip
    return sorted(states, key=lambda state: state.rank)


def all_left(beacons: list[BeaconState], world_size: int) -> bool:
    """Whether every rank of a run has left it, so long ago that its last state would have been written by now."""
    everybody = len(beacons) == world_size and all(beacon.done for beacon in beacons)
    return everybody and time.time() - max(beacon.updated for beacon in beacons) > LEFT
