"""Warm ranks without ipyparallel: n plain processes that run functions together, for `mmlab verify` and for tests.

Starting a process that imports torch costs seconds, so the ranks stay and a
further call costs milliseconds. A call that hangs ends with the stacks of
every rank instead of a silent timeout.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any

from mmlab.errors import MmlabError, RunFailed
from mmlab.messages import process_alive, process_started

GRACE = 0.5
"""Seconds that the other ranks get to report after the first one failed: the cause is then among several reports."""
START_TIMEOUT = 120.0
"""Seconds that a rank may take to import torch and to answer."""


class RankError(RunFailed):
    """One or more ranks of a pool raised, or ended. `tracebacks`: {rank: text}, the first to fail first.

    `said`: the sentence of the first of our own errors that puts the user's input at fault; empty when there is none.
    """

    def __init__(self, message: str, tracebacks: dict[int, str], said: str = "") -> None:
        super().__init__(message + "".join(f"\n--- rank {rank} ---\n{text}" for rank, text in tracebacks.items()))
        self.tracebacks = tracebacks
        self.said = said


class RankTimeout(RankError):
    """A call did not end in time; `tracebacks` holds the stacks of all ranks."""


@dataclass(frozen=True)
class Host:
    """Where a rank runs: in a network namespace ("": this process's own), with its address and interface there."""

    namespace: str = ""
    address: str = "127.0.0.1"
    interface: str = ""

    @property
    def command(self) -> list[str]:
        """What a command that runs there starts with."""
        return ["ip", "netns", "exec", self.namespace] if self.namespace else []

    @property
    def environment(self) -> dict[str, str]:
        """What a rank there needs to know: by itself gloo takes whatever the host's name resolves to."""
        return {"GLOO_SOCKET_IFNAME": self.interface} if self.interface else {}


class _Rank:
    """One process of a pool and the connection to it."""

    def __init__(self, rank: int, folder: Path, threads: int, host: Host) -> None:
        self.rank = rank
        self.stacks = folder / f"rank-{rank}.stacks"
        self.log = folder / f"rank-{rank}.log"
        self.connection, child = Pipe()
        environment = os.environ | {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        environment |= host.environment
        arguments = [str(child.fileno()), str(rank), str(os.getpid()), str(self.stacks)]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                [*host.command, sys.executable, "-m", "mmlab.cluster.pool_rank", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[child.fileno()],
                env=environment,
                start_new_session=True,  # a group of its own: what the rank spawned is killed with it
            )
        child.close()

    def send(self, request: dict[str, Any]) -> None:
        self.connection.send_bytes(pickle.dumps(request))

    def receive(self) -> tuple[str, Any]:
        """The rank's reply; an ended process is an error with the end of what it printed, before all others."""
        try:
            kind, value = pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            code = self.process.wait(5)
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            return "error", (
                0.0,
                f"the process ended ({how})\n{self.output()}{self.stacks.read_text(errors='replace')}",
                "",
            )
        return kind, value

    def output(self) -> str:
        """The end of what the rank printed."""
        return self.log.read_text(errors="replace")[-4000:]

    def dump(self) -> str:
        """The Python stacks of all threads of the rank right now."""
        before = self.stacks.stat().st_size if self.stacks.exists() else 0
        self.process.send_signal(signal.SIGUSR1)
        end = time.monotonic() + 2.0
        size = before
        while time.monotonic() < end:
            time.sleep(0.1)
            now = self.stacks.stat().st_size
            if now > before and now == size:
                break
            size = now
        return self.stacks.read_bytes()[before:].decode(errors="replace") + self.output()

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        self.connection.close()


def _prefix() -> str:
    """What names of pools' folders begin with on this host (several hosts, or containers, may share a folder)."""
    return f"mmlab-pool-{socket.gethostname()}-"


def _sweep() -> None:
    """Remove the folders of pools whose process was killed."""
    for folder in Path(tempfile.gettempdir()).glob("mmlab-pool-*"):
        found = re.fullmatch(r"(\d+)-(\d+)-\w+", folder.name.removeprefix(_prefix()))
        if found and not process_alive(int(found[1]), float(found[2])):
            shutil.rmtree(folder, ignore_errors=True)


class RankPool:
    """`n` warm rank processes; `threads` torch threads each, on `hosts` (one a rank; those beyond it, here).

    The processes start at once and in parallel, and end with `close()` or with their parent.
    """

    def __init__(self, n: int, threads: int = 1, hosts: Sequence[Host] = ()) -> None:
        self.n = n
        self.threads = threads
        self._hosts = tuple(hosts)
        _sweep()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_prefix()}{os.getpid()}-{process_started(os.getpid()):.0f}-"))
        self._ranks: dict[int, _Rank] = {}
        self._start(n)

    def _start(self, n: int) -> None:
        """Have the first `n` ranks; each one that is missing costs three seconds of a core."""
        for rank in range(n):
            if rank not in self._ranks:
                self._ranks[rank] = _Rank(rank, self._folder, self.threads, self._host(rank))

    def _host(self, rank: int) -> Host:
        return self._hosts[rank] if rank < len(self._hosts) else Host()

    @property
    def pids(self) -> list[int]:
        """The processes, in rank order."""
        return [self._ranks[rank].process.pid for rank in sorted(self._ranks)]

    def grow(self, n: int) -> None:
        """Have at least `n` ranks."""
        self.n = max(self.n, n)
        self._start(n)

    def run(
        self,
        function: str | Callable[..., Any],
        *args: Any,
        ranks: int | None = None,
        timeout: float = 60.0,
        **kwargs: Any,
    ) -> list[Any]:
        """Run a function on the first `ranks` ranks (default all) and return the results in rank order.

        `function`: "module:name", or a function of an importable module, called as
        `function(rank, world, store_host, store_port, *args, **kwargs)`; arguments and results are pickled. Each call
        has a fresh TCPStore, to be joined as a client; a process group that the function leaves behind is destroyed.
        RankError when a rank raises or ends, RankTimeout after `timeout` seconds: in both cases the ranks of the call
        are killed, so none stays in a collective, and the next call starts those that it needs.
        """
        world = self.n if ranks is None else ranks
        if world > self.n:
            raise ValueError(f"{world} ranks asked of a pool of {self.n}")
        if not isinstance(function, str):
            function = f"{function.__module__}:{function.__qualname__}"
        self._start(world)
        members = [self._ranks[rank] for rank in range(world)]
        request = {"kind": "call", "function": function, "world": world, "args": args, "kwargs": kwargs}
        request |= {"path": [entry or os.getcwd() for entry in sys.path], "host": self._host(0).address}
        try:
            members[0].send({"kind": "store", "host": request["host"]})
            (port,) = self._collect(members[:1], START_TIMEOUT)
            for member in members:
                member.send(request | {"port": port})
            return [pickle.loads(data) for data in self._collect(members, timeout)]
        except BaseException:
            self._kill(world)
            raise

    def _collect(self, members: list[_Rank], timeout: float) -> list[Any]:
        """One reply of each member, in order."""
        end = time.monotonic() + timeout
        waiting: dict[Any, _Rank] = {member.connection: member for member in members}
        replies: dict[int, Any] = {}
        errors: list[tuple[float, int, str, str]] = []
        while waiting:
            ready = wait(list(waiting), max(0.0, end - time.monotonic()))
            for connection in ready:
                member = waiting.pop(connection)
                kind, value = member.receive()
                if kind == "error":
                    if not errors:
                        end = min(end, time.monotonic() + GRACE)
                    errors.append((value[0], member.rank, *value[1:]))
                else:
                    replies[member.rank] = value
            if not ready:
                break
        if errors:
            # by when each was raised: the others report a broken connection, and may be faster to do so
            texts = {rank: text for _, rank, text, _ in sorted(errors)}
            said = next((said for *_, said in sorted(errors) if said), "")
            raise RankError(f"rank {next(iter(texts))} of {len(members)} failed", texts, said)
        if waiting:
            names = ", ".join(str(member.rank) for member in waiting.values())
            stacks = {member.rank: member.dump() for member in members}
            raise RankTimeout(f"rank {names} of {len(members)} did not end within {timeout:g} s", stacks)
        return [replies[member.rank] for member in members]

    def _kill(self, world: int) -> None:
        """End the first `world` ranks."""
        for rank in [rank for rank in self._ranks if rank < world]:
            self._ranks.pop(rank).kill()

    def close(self) -> None:
        """End all processes and remove their logs."""
        self._kill(self.n)
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextlib.contextmanager
def borrowed(ranks: int, pool: RankPool | None = None, threads: int = 1) -> Iterator[RankPool]:
    """A pool of at least `ranks`: the given one, or a new one of `threads` torch threads each that ends with the block.

    What a rank said is wrong with the user's input comes as MmlabError in place of RankError.
    """
    own = pool or RankPool(ranks, threads)
    try:
        own.grow(ranks)
        yield own
    except RankError as error:
        if error.said:
            raise MmlabError(error.said) from None
        raise
    finally:
        if pool is None:
            own.close()
