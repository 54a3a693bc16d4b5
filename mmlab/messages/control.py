"""The inbox: commands are small JSON files renamed into `<run>/control/`.

Faces write them, the control thread of rank 0 reads them, every rank applies
them at the same step boundary, and rank 0 writes one ack for all.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from mmlab.errors import PlanError
from mmlab.messages.files import read_json, write_json

Verb = Literal[
    "pause", "resume", "step", "set", "measure", "checkpoint", "restore", "relayout", "chaos", "stop", "abort"
]
VERBS: tuple[str, ...] = get_args(Verb)
_sequence = itertools.count()
MOST = 1 << 20
"""Bytes that a command may have."""


@dataclass(frozen=True)
class Command:
    """One command.

    Arguments by verb: step {"n": int}; set {"values": {dotted key: value}}; checkpoint {"name": str};
    restore {"step": int | None, "name": str, and for another layout "changes": {dotted key: value}};
    relayout {"changes": {dotted key: value}}; abort {"generation": int};
    chaos {"action": kill | hang | slow, "rank": int, "seconds": float, "phase": str};
    pause, resume, measure and stop none. An abort does not wait for a step boundary: the control thread of every rank
    carries it out.
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


def answered(command: Command, ack: Ack) -> dict[str, Any]:
    """What the run's log says of a command and what became of it: the fields of its `command` event."""
    about = {"id": command.id, "verb": command.verb, "args": command.args, "source": command.source}
    return about | {"step": ack.step, "ok": ack.ok, "ranks": ack.ranks, "message": ack.message}


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


def read_command(path: Path) -> Command | None:
    """The command in a file; None where it holds none. Reads plain files of at most MOST bytes only: a pipe would
    never come to its end."""
    try:
        known = path.is_file() and path.stat().st_size <= MOST
        found = read_json(path) if known else None
        command = Command(**found) if isinstance(found, dict) else None
    except (OSError, TypeError):
        return None
    if command is None or command.verb not in VERBS or command.id != path.stem:
        return None
    return command if isinstance(command.args, dict) and isinstance(command.time, int | float) else None


def read_abort(control: Path, generation: int, passed: set[str]) -> Command | None:
    """The abort of a generation that waits in a run's inbox; None without one. Names in `passed` are passed over, and
    those of files that are something else are added to it, so that each file is read once."""
    for path in sorted(control.glob("*.json")):
        if path.name in passed:
            continue
        command = read_command(path)
        if command is not None and command.verb == "abort" and command.args.get("generation", generation) == generation:
            return command
        passed.add(path.name)
    return None


class Inbox:
    """Rank 0's side of the control folder."""

    def __init__(self, control: Path) -> None:
        self.control = control

    def pending(self) -> list[Command]:
        """Commands that wait, oldest first. A file that is not a command is answered with a refusal and removed."""
        commands = []
        for path in sorted(self.control.glob("*.json")):
            command = read_command(path)
            if command is not None:
                commands.append(command)
            elif os.path.lexists(path):  # else it was answered meanwhile
                self._refuse(path)
        return commands

    def _refuse(self, path: Path) -> None:
        """Answer what is not a command, and take it out of the way. Whatever lies there, the run goes on."""
        with contextlib.suppress(OSError):  # its name may leave no room for an answer's, or it may be a folder
            self.answer(Ack(path.stem, False, -1, [], f"not a command: {path.name}", time.time()))
        with contextlib.suppress(OSError):
            if path.is_dir() and not path.is_symlink():
                path.rename(path.with_name(f"{path.stem[:100]}.refused-{time.time_ns()}"))
            else:
                path.unlink(missing_ok=True)

    def answer(self, ack: Ack) -> None:
        """Write the ack, then remove the command: also where a full disk does not take the ack, or it would be applied
        again."""
        (self.control / "acks").mkdir(exist_ok=True)
        try:
            write_json(self.control / "acks" / f"{ack.id}.json", asdict(ack))
        finally:
            (self.control / f"{ack.id}.json").unlink(missing_ok=True)
