"""Commands at the step boundary, and the thread that listens for them.

The control thread of rank 0 polls the inbox; "a command waits" rides in the
step's own reduction, so all ranks enter the same boundary and no step pays for
an extra collective. The thread of every rank also watches for failures of
others and frees its rank from a collective that can no longer finish.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mmlab.messages import (
    Ack,
    Command,
    Inbox,
    RunPaths,
    answered,
    read_abort,
    read_aborted,
    read_failures,
    write_aborted,
)
from mmlab.messages.moves import moving_on
from mmlab.messages.notices import take_notices
from mmlab.parallel.abort import Connections
from mmlab.parallel.mesh import Mesh
from mmlab.train.vitals import Vitals

UNWIND = 0.3
"""Seconds that a call which was cut gets to raise, before the training thread is interrupted wherever it is."""
POLL = 0.1
"""Seconds between looks into the inbox and for failures (the design asks for 0.2 at most)."""
LEAVE = 3.0
"""Seconds in which all ranks leave a generation whose state is on its way to the next one."""
SIGN_OF_LIFE = 5.0
"""Seconds between broadcasts during a pause: far below the groups' timeout, so a pause may last for days."""


class Interrupted(BaseException):
    """The training thread is to leave. Not an Exception, so that nothing on the way takes it for an error that it can
    handle."""


class Aborted(Interrupted):
    """The run was aborted."""


class Hung(Interrupted):
    """The keeper found that the others wait for this rank."""


class Channel:
    """Small JSON values between all ranks, over the control group."""

    def __init__(self, mesh: Mesh) -> None:
        self.group = mesh.control
        self.rank = mesh.place.rank
        self.world_size = mesh.world_size

    def share(self, value: Any) -> Any:
        """Rank 0's value on every rank."""
        if self.group is None:
            return value
        data = json.dumps(value).encode() if self.rank == 0 else b""
        size = torch.tensor([len(data)], dtype=torch.int64)
        dist.broadcast(size, 0, group=self.group)
        buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8) if self.rank == 0 else torch.empty(0)
        if self.rank != 0:
            buffer = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(buffer, 0, group=self.group)
        return json.loads(bytes(buffer.numpy()))

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, in rank order, on every rank."""
        if self.group is None:
            return [value]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, value, group=self.group)
        return found


class Listener:
    """The control thread of one rank, from before the rendezvous to the end. Made in the training thread.

    It listens for commands (rank 0), failures of others, an abort, and questions where the rank is. `aborted` is the
    command that aborted the run.
    """

    def __init__(self, paths: RunPaths, rank: int, generation: int, connections: Connections) -> None:
        self.paths, self.rank, self.generation, self.connections = paths, rank, generation, connections
        self.inbox = Inbox(paths.control)
        self.aborted: Command | None = None
        self._vitals = Vitals(paths.ranks, rank, generation)
        self._passed: set[str] = set()
        self._interruptible, self._lock = True, threading.Lock()
        self._waiting = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"mmlab-control-{self.rank}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        since, moved = 0.0, 0.0
        while not self._stop.wait(POLL):
            self._vitals.look()
            folders = (self.paths.control, self.paths.notices) if self.rank == 0 else ()
            if any(any(folder.glob("*.json")) for folder in folders):
                self._waiting.set()
            if self.aborted is None:
                self.aborted = self._find_abort()
            moved = moved or (time.monotonic() if moving_on(self.paths, self.generation) else 0.0)
            if moved and time.monotonic() - moved > LEAVE:  # a rank died after the state was whole
                self._cut()
            failures = read_failures(self.paths.failures, self.generation)
            others = [failure for failure in failures if failure.rank != self.rank]
            hung = any(f.rank == self.rank and f.kind == "hung" for f in failures)
            if others or hung or self.aborted is not None:  # each time: who had not joined yet opens connections later
                self._cut()
                self._waiting.set()  # a pause that waits for a command
            if self.aborted is None and not hung:
                since = time.monotonic()
            elif time.monotonic() - since > UNWIND:
                self._interrupt(Hung if self.aborted is None else Aborted)
                since = time.monotonic()

    def _cut(self) -> None:
        """Free the training thread, unless it has left: a file system may have held this thread up for so long that the
        groups of this process are the next generation's."""
        if not self._stop.is_set():
            self.connections.cut()

    def _find_abort(self) -> Command | None:
        """What aborts this generation: a record that a faster rank made, or a command in the inbox, now on record."""
        found = read_aborted(self.paths.failures, self.generation)
        if found is None:
            found = read_abort(self.paths.control, self.generation, self._passed)
            if found is not None:
                with contextlib.suppress(OSError):  # a full disk: the others read the inbox
                    write_aborted(self.paths.failures, self.generation, found)
        return found

    def _interrupt(self, error: type[Interrupted]) -> None:
        """Raise an error in the training thread, wherever its Python code is: it is in no call that could be cut."""
        with self._lock:
            if self._interruptible:
                thread = ctypes.c_ulong(self._vitals.thread)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(error))

    def uninterruptible(self) -> None:
        """From now on the training thread tidies up: nothing is raised in it. May raise Interrupted a last time."""
        with self._lock:
            self._interruptible = False

    def waiting(self) -> bool:
        """Whether a command waits (rank 0; the others never know before the boundary)."""
        return self._waiting.is_set()

    def take(self) -> list[Command]:
        """The commands that wait, and notices that a host goes away as commands to leave it, which come first."""
        self._waiting.clear()
        if self.rank != 0:
            return []
        notices = [Command(name, "leave", vars(n), n.source, n.time) for name, n in take_notices(self.paths)]
        return notices + self.inbox.pending()

    def wait(self, seconds: float) -> None:
        """Return when a command waits, at the latest after some seconds."""
        self._waiting.wait(seconds)

    def answer(self, ack: Ack) -> None:
        """Write an ack (rank 0). On a full disk nobody gets it; the command is in the log as soon as there is room."""
        if self.rank == 0:
            with contextlib.suppress(OSError):
                self.inbox.answer(ack)

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not threading.current_thread():
            self._thread.join(2.0)


class Boundary:
    """Applies commands between two steps, on the same step on every rank."""

    def __init__(self, channel: Channel, listener: Listener, emit: Callable[..., Any]) -> None:
        self.channel, self.listener, self.emit = channel, listener, emit

    def commands(self, wait: bool) -> list[Command]:
        """The commands to apply now, equal on all ranks; with `wait` (a pause) blocks until there is one.

        While it waits, rank 0 sends a sign of life every SIGN_OF_LIFE seconds, an empty list that the others pass over.
        """
        while True:
            if wait and self.channel.rank == 0:
                self.listener.wait(SIGN_OF_LIFE)
            mine = [vars(command) for command in self.listener.take()]
            found = self.channel.share(mine)
            if found or not wait:
                return [Command(**value) for value in found]

    def outcome(self, command: Command, step: int, message: str, ok: bool) -> Ack:
        """Gather every rank's outcome and log the command; returns the answer, which is still to be given."""
        outcomes = self.channel.gather([self.channel.rank, ok, message])
        failed = [f"rank {rank}: {text}" if len(outcomes) > 1 else text for rank, good, text in outcomes if not good]
        texts = {text for _, good, text in outcomes if not good}
        reason = texts.pop() if len(texts) == 1 else "; ".join(failed)
        ranks = [rank for rank, _, _ in outcomes]
        ack = Ack(command.id, not failed, step, ranks, reason or message, time.time())
        self.emit("command", **answered(command, ack))
        return ack
