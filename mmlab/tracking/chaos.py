"""Faults on purpose, by real means: killed, hung and slow ranks, notices, damaged checkpoints. Each is in the event
log."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mmlab.errors import CheckpointError, MmlabError
from mmlab.messages import Ack, EventLog, Inbox, answered, new_command, process_alive
from mmlab.messages.beacon import PHASES, BeaconState
from mmlab.messages.checkpoints import MANIFEST
from mmlab.messages.locations import Location
from mmlab.messages.notices import CHAOS, Notice, write_notice
from mmlab.tracking.record import RunRecord
from mmlab.tracking.sent import Sent

ACTIONS = ("kill", "hang", "slow", "notice", "corrupt")
STRIKES_IN = tuple(phase for phase in PHASES if phase not in ("start", "control", "idle"))
"""Phases in which a fault may be asked for."""


@dataclass(frozen=True)
class Strike:
    """One action: `target` is a rank, or what `corrupt` damages; `seconds` and `phase` as asked for."""

    action: str
    target: Any
    seconds: float | None
    phase: str

    def args(self) -> dict[str, Any]:
        """What the command carries."""
        found: dict[str, Any] = {"action": self.action}
        found["name" if self.action == "corrupt" else "rank"] = self.target
        return found | {k: v for k, v in (("seconds", self.seconds), ("phase", self.phase)) if v}


def chosen(asked: Mapping[str, Any], seconds: float | None, phase: str) -> Strike:
    """The one action that is asked for. MmlabError on none, several, and values that make no sense."""
    if len(asked) != 1 or asked.keys() - set(ACTIONS):
        what = f"not {', '.join(asked)}" if asked else "such as kill=1"
        raise MmlabError(f"chaos takes one action at a time, of {', '.join(ACTIONS)}, {what}")
    ((action, target),) = asked.items()
    if action == "corrupt":
        if not isinstance(target, str) or not target:
            raise MmlabError(f'chaos corrupt= takes "last" or the name of a checkpoint, not {target!r}')
    elif not isinstance(target, int) or isinstance(target, bool):
        raise MmlabError(f"chaos {action}= takes a rank, not {target!r}")
    if phase and (phase not in STRIKES_IN or action not in ("kill", "hang", "slow")):
        raise MmlabError(f"chaos phase= goes with kill, hang and slow, and is one of {', '.join(STRIKES_IN)}")
    if action == "slow" and (not isinstance(seconds, int | float) or isinstance(seconds, bool) or seconds < 0):
        raise MmlabError("chaos slow= needs seconds=, by which each step of the rank is slower; 0 ends it")
    number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if action == "notice" and seconds is not None and not (number and seconds >= 0):
        raise MmlabError(f"chaos notice= takes seconds= until the process would be taken away, not {seconds!r}")
    if action not in ("slow", "notice") and seconds is not None:
        raise MmlabError("chaos seconds= goes with slow and notice")
    return Strike(action, target, seconds, phase)


def check_rank(record: RunRecord, strike: Strike) -> None:
    """MmlabError when the run has no such rank."""
    world = int(record.info.get("world_size", 0))
    if strike.action != "corrupt" and not 0 <= strike.target < world:
        raise MmlabError(f"chaos {strike.action}={strike.target}: the run has ranks 0 to {world - 1}")


def here_and_now(record: RunRecord, strike: Strike) -> Sent | None:
    """Do what needs no step boundary: kill a process of this host, damage a file, leave a notice. None for all else."""
    if strike.action == "corrupt":
        return _logged(record, strike, [], _flip(record, strike.target))
    beacon = next((beacon for beacon in record.beacons() if beacon.rank == strike.target), None)
    if strike.action == "notice":
        return _give_notice(record, strike, beacon)
    if strike.action != "kill" or strike.phase:
        return None
    if beacon is None or beacon.host != socket.gethostname():
        return None
    if beacon.done or not process_alive(beacon.pid, beacon.started):
        raise MmlabError(f"chaos kill={strike.target}: its process (pid {beacon.pid}) has ended already")
    text = f"SIGKILL to rank {beacon.rank} ({beacon.role}, pid {beacon.pid}), in {beacon.phase} of step {beacon.step}"
    sent = _logged(record, strike, [beacon.rank], text)  # first: afterwards nobody may be there to see it
    os.kill(beacon.pid, signal.SIGKILL)
    return sent


def _give_notice(record: RunRecord, strike: Strike, beacon: BeaconState | None) -> Sent:
    """Say that a rank's process is about to be taken away; the lab's keeper then does it, as a cloud would."""
    if beacon is None:
        raise MmlabError(f"chaos notice={strike.target}: that rank has not started yet")
    grace = record.plan.cluster.grace if strike.seconds is None else strike.seconds
    deadline = time.time() + grace
    sent = _logged(record, strike, [beacon.rank], f"notice to rank {beacon.rank} ({beacon.role}, pid {beacon.pid})")
    try:
        write_notice(record.paths, Notice("leave", CHAOS, beacon.host, beacon.pid, deadline))
    except OSError as error:
        raise MmlabError(f"chaos: {record.paths.root} cannot be written: {error.strerror}") from None
    return sent


def _logged(record: RunRecord, strike: Strike, ranks: list[int], message: str) -> Sent:
    """Write down what is done, and its answer, as a rank would."""
    command = new_command("chaos", strike.args())
    status = record.status()
    ack = Ack(command.id, True, status["step"], ranks, message, time.time())
    try:
        log = EventLog(record.paths.events, status["lineage"])
        log.emit("command", **answered(command, ack))
        log.close()
        Inbox(record.paths.control).answer(ack)
    except OSError as error:
        raise MmlabError(f"chaos: {record.paths.root} cannot be written: {error.strerror}") from None
    return Sent("chaos", command.id, record.paths.control)


def _flip(record: RunRecord, name: str) -> str:
    """Flip the bits of one byte in the middle of a checkpoint's largest file ("last": the newest one's)."""
    if not record.checkpoints():
        raise CheckpointError(f"chaos corrupt={name}: run {record.id} has no checkpoint yet")
    folder = Location(record.find_checkpoint(name="" if name == "last" else name)["path"])
    try:
        sizes = {file: size for file, size in folder.sizes().items() if file != MANIFEST}
        file = max(sizes, key=lambda file: sizes[file])
        data = bytearray(folder.read(file))
        data[len(data) // 2] ^= 0xFF
        folder.write(file, bytes(data))
    except OSError as error:
        raise MmlabError(f"chaos: {folder} cannot be written: {error}") from None
    return f"flipped byte {len(data) // 2} of {file} in checkpoint {folder.name}"
