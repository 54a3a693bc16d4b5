"""A run on its way to another layout, or to other engines: where its state is meanwhile, and what becomes of it.

`<run>/relayout.json` is there from the moment that the state of the generation before is whole until the next one has
taken it up. The state itself is a checkpoint: in memory (a folder of this run's own on a tmpfs of the host), or on disk
among the run's checkpoints.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from mmlab.messages.checkpoints import MANIFEST, kept_at
from mmlab.messages.control import Ack, Inbox, answered
from mmlab.messages.files import RunPaths, read_json, write_atomic, write_json
from mmlab.messages.locations import Location

ROOM = 1.25
"""Times the bytes of a state that a tmpfs, and the machine's memory, must have free: the manifest, and files' slack."""


class NotRescued(OSError):
    """A state could not be written to where the run's checkpoints lie: it stays where it is, and may be tried again."""


@dataclass(frozen=True)
class Move:
    """What the next generation of a run begins with.

    `generation` is that next one's number; `command` asked for it; `name` of the state, a checkpoint in `folder` of
    `host`, in memory or not; `plan` is TOML; `before` and `after` ranks; `began` seconds since the epoch; `paused` and
    `remaining` (steps until the next pause) as the run is steered; `notice` why it leaves its engines (empty: another
    layout). With a notice the state is an ordinary checkpoint, by name; it has none where there was no time to save.
    """

    generation: int
    command: str
    name: str
    folder: str
    host: str
    memory: bool
    step: int
    plan: str
    before: int
    after: int
    began: float
    bytes: int
    changes: dict[str, list[Any]]
    paused: bool = False
    remaining: int | None = None
    notice: str = ""

    @property
    def reason(self) -> str:
        """What changes, in one line."""
        if self.notice:
            return self.notice
        shown = ", ".join(f"{key} {old} -> {new}" for key, (old, new) in list(self.changes.items())[:6])
        more = f" and {len(self.changes) - 6} more" if len(self.changes) > 6 else ""
        ranks = f" ({self.before} -> {self.after} ranks)" if self.before != self.after else ""
        return f"another layout{ranks}: {shown}{more}"


def read_move(paths: RunPaths) -> Move | None:
    """The move that a run is in; None where it is in none."""
    found = read_json(paths.move)
    return Move(**found) if isinstance(found, dict) else None


def moving_on(paths: RunPaths, generation: int) -> Move | None:
    """The move that has ended a generation: whatever becomes of its ranks, the next one takes over. None without."""
    move = read_move(paths)
    return move if move is not None and move.generation == generation + 1 else None


def write_move(paths: RunPaths, move: Move) -> None:
    """Say that a state is whole: from here on the next generation takes over."""
    write_json(paths.move, asdict(move))


def take_plan(paths: RunPaths, move: Move) -> None:
    """Make the plan of a move the run's; the one before is kept as `plans/generation-N.toml`. A smaller layout that was
    taken for want of engines is over: whoever moves the run says in which one it is to be."""
    replace_plan(paths, move.plan, move.generation)


def replace_plan(paths: RunPaths, toml: str, generation: int) -> None:
    """Give a generation of a run its plan; the one before is kept as `plans/generation-N.toml`."""
    paths.full_plan.unlink(missing_ok=True)
    old, new = paths.plan.read_bytes(), toml.encode()
    if old != new:
        paths.plans.mkdir(exist_ok=True)
        write_atomic(paths.plans / f"generation-{generation - 1}.toml", old)
        write_atomic(paths.plan, new)


def say_moved(paths: RunPaths, move: Move, steps: int, emit: Callable[..., None]) -> None:
    """Log that a run has another layout, in which it is to do `steps` steps, and answer the command that asked for it,
    where a rank died between the state and the answer."""
    emit(
        "relayout", step=move.step, name=move.name, changes=move.changes, before=move.before, after=move.after,
        generation=move.generation, through="memory" if move.memory else "disk", bytes=move.bytes,
        seconds=round(time.time() - move.began, 3), steps=steps,
    )  # fmt: skip
    inbox = Inbox(paths.control)
    for command in inbox.pending():
        if command.id == move.command:
            ack = Ack(command.id, True, move.step, list(range(move.before)), move.reason, time.time())
            emit("command", **answered(command, ack))
            with contextlib.suppress(OSError):  # on a full disk the log says so as soon as there is room
                inbox.answer(ack)


def falls_back(paths: RunPaths, generation: int) -> Move | None:
    """The move that a generation has not taken up, where a keeper can let the run go on in the layout before: a new
    layout that cannot start (too little memory, say) ends no run. None where it cannot."""
    move = read_move(paths)
    if move is None or move.generation != generation or move.notice:
        return None
    kept = (paths.plans / f"generation-{generation - 1}.toml").is_file()
    return move if kept and (read_json(paths.run) or {}).get("keeper") else None


def go_back(paths: RunPaths, move: Move) -> str:
    """Make the plan before a move the run's again, and its state a checkpoint; its name. The move is there until the
    next generation has its number: without it the run would have failed."""
    write_atomic(paths.plan, (paths.plans / f"generation-{move.generation - 1}.toml").read_bytes())
    return save_move(paths)


def memory_folders(paths: RunPaths) -> list[Path]:
    """Where a state of this run may be in the memory of this host: a folder on each tmpfs that it may write to."""
    name = f"mmlab-relayout-{os.getuid()}-{hashlib.sha256(str(paths.root.resolve()).encode()).hexdigest()[:16]}"
    wanted = [Path("/dev/shm"), Path(f"/run/user/{os.getuid()}"), Path(tempfile.gettempdir())]
    memory = {part.mountpoint for part in psutil.disk_partitions(all=True) if part.fstype == "tmpfs"}
    return [root / name for root in wanted if str(root) in memory and os.access(root, os.W_OK | os.X_OK)]


def memory_with_room(paths: RunPaths, size: int) -> Path | None:
    """Where `size` bytes fit into memory; None where they do not."""
    if psutil.virtual_memory().available < ROOM * size:
        return None
    return next((f for f in memory_folders(paths) if shutil.disk_usage(f.parent).free > ROOM * size), None)


def forget_move(paths: RunPaths) -> None:
    """The state has been taken up: nothing is on its way any more."""
    paths.move.unlink(missing_ok=True)
    for folder in memory_folders(paths):
        shutil.rmtree(folder, ignore_errors=True)


def rescue_move(paths: RunPaths) -> str:
    """Make a state that no generation has taken up one of the run's checkpoints, where its plan keeps them, and leave
    nothing in memory; its name.

    Empty where there is nothing to rescue. NotRescued when it cannot be written there.
    """
    name = save_move(paths)
    forget_move(paths)  # without a move: a rank that died while the state was written has left a part of it in memory
    return name


def save_move(paths: RunPaths) -> str:
    """The same, with the move and what is in memory left there."""
    move = read_move(paths)
    if move is None:
        return ""
    source, target = Path(move.folder), kept_at(paths) / move.name
    reached = bool(move.folder) and (not move.memory or move.host == socket.gethostname())
    try:
        # It may have been brought there before, and be gone here.
        if reached and (source / MANIFEST).is_file() and not _same(source, target):
            if MANIFEST not in target.sizes():
                _bring(source, target)
            if not move.memory:
                Location(source).remove(first=MANIFEST)
        return move.name if MANIFEST in target.sizes() else ""
    except OSError as error:
        why = error.args[0][0][2] if isinstance(error, shutil.Error) else error.strerror or error
        raise NotRescued(f"the state of step {move.step} cannot be kept at {target}: {why}") from error


def _same(source: Path, target: Location) -> bool:
    return target.local is not None and target.local.exists() and target.local.samefile(source)


def _bring(source: Path, target: Location) -> None:
    """Copy a state to where the run's checkpoints lie; it is there when its manifest is."""
    target.make()
    if target.local is None:
        for file in sorted(source.iterdir(), key=lambda file: file.name == MANIFEST):
            target.put(file)
        return
    copy = target.local.with_name(f".{target.name}.partial")
    shutil.rmtree(copy, ignore_errors=True)
    try:
        shutil.copytree(source, copy)
        shutil.rmtree(target.local)
        os.replace(copy, target.local)
    finally:
        shutil.rmtree(copy, ignore_errors=True)
