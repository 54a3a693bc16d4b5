"""Commands at the step boundary, and the thread that listens for them.

The control thread of rank 0 polls the inbox; "a command waits" rides in the
step's own reduction, so all ranks enter the same boundary and no step pays for
an extra collective. The thread of every rank also watches for failures of
others and frees its rank from a collective that can no longer finish.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from mmlab.messages import Ack, Command, Inbox, RunPaths, read_failures
from mmlab.parallel.abort import Connections
from mmlab.parallel.mesh import Mesh

POLL = 0.1
"""Seconds between looks into the inbox and for failures (the design asks for 0.2 at most)."""
SIGN_OF_LIFE = 5.0
"""Seconds between broadcasts during a pause: far below the groups' timeout, so a pause may last for days."""


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
    """The control thread of one rank, from before the rendezvous to the end."""

    def __init__(self, paths: RunPaths, rank: int, generation: int, connections: Connections) -> None:
        self.paths, self.rank, self.generation, self.connections = paths, rank, generation, connections
        self.inbox = Inbox(paths.control)
        self._waiting = threading.Event()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"mmlab-control-{self.rank}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(POLL):
            if self.rank == 0 and any(self.paths.control.glob("*.json")):
                self._waiting.set()
            others = [f for f in read_failures(self.paths.failures, self.generation) if f.rank != self.rank]
            if others:  # at every look: a rank that had not joined yet opens its connections later
                self.connections.cut()

    def waiting(self) -> bool:
        """Whether a command waits (rank 0; the others never know before the boundary)."""
        return self._waiting.is_set()

    def take(self) -> list[Command]:
        """The commands that wait."""
        self._waiting.clear()
        return self.inbox.pending() if self.rank == 0 else []

    def wait(self, seconds: float) -> None:
        """Return when a command waits, at the latest after some seconds."""
        self._waiting.wait(seconds)

    def answer(self, ack: Ack) -> None:
        """Write an ack (rank 0)."""
        if self.rank == 0:
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
        self.emit("command", step=step, id=command.id, verb=command.verb, args=command.args, source=command.source,
                  ok=ack.ok, ranks=ranks, message=ack.message)  # fmt: skip
        return ack
