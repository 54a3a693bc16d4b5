"""The inbox: commands are small JSON files renamed into `<run>/control/`.

Faces write them, the control thread of rank 0 reads them, every rank applies
them at the same step boundary, and rank 0 writes one ack for all.
"""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from mmlab.errors import PlanError
from mmlab.messages.files import read_json, write_json

Verb = Literal["pause", "resume", "step", "set", "checkpoint", "restore", "stop"]
VERBS: tuple[str, ...] = get_args(Verb)
_sequence = itertools.count()


@dataclass(frozen=True)
class Command:
    """One command.

    Arguments by verb: step {"n": int}; set {"values": {dotted key: value}}; checkpoint {"name": str};
    restore {"step": int | None, "name": str}; pause, resume and stop none.
    """

    id: str
    verb: str
    args: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    time: float = 0.0


@dataclass(frozen=True)
class Ack:
    """What became of a command: the step after which it was applied and the ranks that did."""

    id: str
    ok: bool
    step: int
    ranks: list[int]
    message: str = ""
    time: float = 0.0


def new_command(verb: str, args: dict[str, Any] | None = None, source: str = "api") -> Command:
    """A command with a sortable id. PlanError on an unknown verb."""
    if verb not in VERBS:
        raise PlanError(f"unknown command {verb!r}; known: {', '.join(VERBS)}")
    name = f"{time.time_ns():020d}-{os.getpid()}-{next(_sequence):06d}"
    return Command(name, verb, args or {}, source, time.time())


def send(control: Path, command: Command) -> None:
    """Put a command into a run's inbox."""
    write_json(control / f"{command.id}.json", asdict(command))


def read_ack(control: Path, command_id: str) -> Ack | None:
    """The ack of a command, None while there is none."""
    found = read_json(control / "acks" / f"{command_id}.json")
    return Ack(**found) if found else None


def wait_ack(control: Path, command_id: str, timeout: float) -> Ack | None:
    """Wait for the ack of a command, at most `timeout` seconds."""
    end = time.monotonic() + timeout
    while (ack := read_ack(control, command_id)) is None and time.monotonic() < end:
        time.sleep(0.02)
    return ack


class Inbox:
    """Rank 0's side of the control folder."""

    def __init__(self, control: Path) -> None:
        self.control = control

    def pending(self) -> list[Command]:
        """Commands that wait, oldest first. A file that is not a command is answered with a refusal and removed."""
        commands = []
        for path in sorted(self.control.glob("*.json")):
            found = read_json(path)
            try:
                command = Command(**found) if isinstance(found, dict) else None
            except TypeError:
                command = None
            if (
                command is None
                or command.verb not in VERBS
                or command.id != path.stem
                or not isinstance(command.args, dict)
            ):
                self.answer(Ack(path.stem, False, -1, [], f"not a command: {path.name}", time.time()))
                continue
            commands.append(command)
        return commands

    def answer(self, ack: Ack) -> None:
        """Write the ack, then remove the command."""
        (self.control / "acks").mkdir(exist_ok=True)
        write_json(self.control / "acks" / f"{ack.id}.json", asdict(ack))
        (self.control / f"{ack.id}.json").unlink(missing_ok=True)
