"""What a group has under way, and who drives it on.

A collective is a generator that yields whenever it has to wait for a flag of
another rank. Whoever waits for it drives it: first it spins, then it yields
the core, then it sleeps on a futex until a peer rings. What nobody waits for
(async calls, sends larger than a ring) is driven by a thread, so it goes on
while this rank computes.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmlab.parallel.shm import layout as at
from mmlab.parallel.shm.p2p import Mail
from mmlab.parallel.shm.segment import Segment, now

Steps = Generator[tuple[int, int], None, None]
"""A collective: yields (rank, flag) to wait until that rank's flag, or every rank's if rank is -1, reaches a value."""

SPINS, YIELDS = 3, 6
"""Looks at the flags before yielding the core, and before sleeping: about 5 and 100 microseconds. Ranks often share a
core, and then every spin delays the peer that is waited for: 30 spins made a 4 KB all-reduce a third slower."""
NAP, LONG_NAP, PATIENCE = 0.005, 0.05, 1.0
"""Seconds of a sleep that nobody ends (a bell rung in the very moment of falling asleep is missed), and of one after
PATIENCE seconds."""
LOOK = 0.2
"""Seconds between looks whether the peers still live."""
GRACE, IDLE = 0.001, 0.5
"""The driving thread leaves a new call to a waiter for GRACE seconds and ends after IDLE seconds without any."""


_OPS = {op: number for number, op in enumerate(at.OPS)}


class PeerLost(dist.DistBackendError):
    """A shared-memory call cannot finish: a peer ended, left, did not come in time, or the group was aborted."""


class ShmWork(dist._Work):
    """One call under way. `wait` drives it to its end; raises what went wrong."""

    done = False
    error: BaseException | None = None
    needs: tuple[int, int] | None = None  # what the generator waits for
    steps: Steps | None = None
    call: tuple[str, int, int] | None = None  # of a collective: op, bytes, number
    note: tuple[str, int, int, int] | None = None  # of a send or receive: op, peer, tag, bytes
    source = -1
    _future: torch.futures.Future | None = None

    def __init__(self, progress: Progress, result: list[Tensor], finish: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.progress, self.tensors, self.finish = progress, result, finish
        self.deadline = 0.0

    @property
    def label(self) -> str:
        """The call in words, for messages."""
        if self.call is not None:
            return f"{self.call[0]} #{self.call[2]}"
        if self.note is not None:
            return f"{self.note[0]} ({'to' if self.note[0] == 'send' else 'from'} {self.note[1]}, tag {self.note[2]})"
        return "a call"

    def complete(self, error: BaseException | None = None) -> None:
        """Mark as done (by whoever drove it)."""
        self.steps = None
        if error is None and self.finish is not None:
            try:
                self.finish()
            except Exception as failed:
                error = failed
        self.finish = None
        self.error = error
        self.done = True
        if self._future is not None:
            self._resolve(self._future)

    def _resolve(self, future: torch.futures.Future) -> None:
        if self.error is None:
            future.set_result(self.tensors)
        else:
            future.set_exception(self.error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the call is complete; PeerLost when it cannot be."""
        if not self.done:
            self.progress.drive(self, timeout)
        if self.error is not None:
            raise self.error
        return True

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the call is complete; drives it as far as it goes without waiting."""
        if not self.done:
            self.progress.poll()
        return self.done

    def is_success(self) -> bool:
        """Whether the call is complete and nothing went wrong."""
        return self.done and self.error is None

    def exception(self) -> Any:
        """What went wrong, None if nothing did."""
        return self.error

    def _source_rank(self) -> int:
        """The rank of the group that a received message came from."""
        return self.source

    source_rank = _source_rank

    def result(self) -> list[Tensor]:
        """The tensors that the call fills."""
        return self.tensors

    def get_future(self) -> torch.futures.Future:
        """A future of `result()`."""
        with self.progress.lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if self.done:
                    self._resolve(self._future)
                else:
                    self.progress.hand_over()
        return self._future


class Progress:
    """The calls of one group on one rank: collectives in the order of their issue, and the mail between pairs."""

    def __init__(self, segment: Segment, timeout: timedelta, siblings: Callable[[], list[Progress]]) -> None:
        self.segment, self.timeout, self.siblings = segment, timeout.total_seconds(), siblings
        self.lock = threading.RLock()
        self.queue: deque[ShmWork] = deque()
        self.mail = Mail(segment)
        self.error: BaseException | None = None
        self._calls = 0
        self._waiters = 0
        self._handed: float | None = None
        self._thread: threading.Thread | None = None

    def start(self, op: str, bytes_: int, work: ShmWork, steps: Callable[[int], Steps], background: bool) -> ShmWork:
        """Issue a collective; `steps(number)` makes its generator."""
        with self.lock:
            self._usable()
            self._calls += 1
            work.call = (op, bytes_, self._calls)
            work.deadline = time.monotonic() + self.timeout
            work.steps = steps(self._calls)
            self.queue.append(work)
            self.advance()
            if background and not work.done:
                self.hand_over()
        return work

    def _enter(self, op: str, bytes_: int, number: int) -> None:
        """Record that this rank enters a call, for `read_calls`."""
        words, me = self.segment.words, self.segment.me
        words[me + at.CALL_OP], words[me + at.CALL_BYTES] = _OPS[op], bytes_
        words[me + at.CALL_TIME] = now()
        words[me + at.CALL] = number

    def start_mail(self, work: ShmWork, post: Callable[[ShmWork], None], background: bool) -> ShmWork:
        """Issue a send or a receive."""
        with self.lock:
            self._usable()
            work.deadline = time.monotonic() + self.timeout
            post(work)
            self.mail.pump()
            if background and not work.done:
                self.hand_over()
        return work

    def _usable(self) -> None:
        if self.error is None and self.segment.mapped is None:
            self.error = PeerLost("shm: the connection to the peers of this group is closed")
        if self.error is None and self.segment.words[at.ABORT]:
            self.error = PeerLost("shm: the connection to the peers was aborted")
        if self.error is not None:
            raise PeerLost(str(self.error))

    def advance(self) -> None:
        """Drive everything as far as it goes without waiting. Under the lock."""
        try:
            words, flags = self.segment.words, self.segment.flags
            while self.queue:
                work = self.queue[0]
                needs, steps = work.needs, work.steps
                assert steps is not None
                assert work.call is not None
                if needs is None:
                    self._enter(*work.call)
                try:
                    while True:
                        if needs is not None:
                            who, value = needs
                            if who >= 0:
                                if words[flags[who]] < value:
                                    return
                            else:
                                for flag in flags:
                                    if words[flag] < value:
                                        return
                        needs = work.needs = next(steps)
                except StopIteration:
                    pass
                words[self.segment.me + at.CALLS_DONE] = work.call[2]
                self.queue.popleft()
                work.complete()
        except BaseException as error:
            self._fail(error)
            if not isinstance(error, Exception):
                raise  # an interrupt is not for the works' waiters alone

    def poll(self) -> None:
        """Drive everything as far as it goes without waiting."""
        with self.lock:
            if self.error is None and self.segment.mapped is not None:
                self.advance()
                self.mail.pump()

    def _fail(self, error: BaseException) -> None:
        """Nothing of this group can finish any more: the ranks are no longer in step."""
        if self.error is None:
            self.error = error
        works = [*self.queue, *self.mail.works()]
        self.queue.clear()
        self.mail.clear()
        for work in works:
            if not work.done:
                work.complete(error)

    def drive(self, work: ShmWork, timeout: timedelta | None = None) -> None:
        """Wait for one call, driving all of them."""
        limit = timeout.total_seconds() if timeout else 0.0
        deadline = time.monotonic() + limit if limit > 0 else work.deadline
        self._waiters += 1
        try:
            self._note(work, True)
            self._drive(work, deadline)
        finally:
            self._waiters -= 1
            self._note(work, False)

    def _note(self, work: ShmWork, waiting: bool) -> None:
        if work.note is not None:
            with self.lock:
                if self.segment.mapped is not None:
                    self.mail.note(*work.note, waiting)

    def _drive(self, work: ShmWork, deadline: float) -> None:
        looks, began, looked = 0, 0.0, 0.0
        while not work.done:
            looks += 1
            if looks <= YIELDS:
                if looks > SPINS:
                    os.sched_yield()
                self._step(work.steps is None)
                continue
            long = False
            if looks == YIELDS + 1:
                began = looked = time.monotonic()
            else:  # a nap has gone by
                clock = time.monotonic()
                long = clock - began > PATIENCE
                if clock - looked > LOOK or clock > deadline:
                    looked = clock
                    self._examine(work, clock > deadline)
                if self._aborted_anywhere():
                    self._step(True)
                    with self.lock:
                        self._fail(PeerLost(f"shm: the connection to the peers was aborted in {work.label}"))
            self._nap(work, LONG_NAP if long else NAP)

    def _step(self, mail: bool) -> None:
        with self.lock:
            if self.error is None:
                self.advance()
                if mail and self.error is None:
                    self.mail.pump()

    def _nap(self, work: ShmWork, seconds: float) -> None:
        """Sleep until a peer rings."""
        segment = self.segment
        with self.lock:
            if work.done:
                return
            if segment.mapped is None:
                self._fail(PeerLost("shm: the connection to the peers of this group is closed"))
                return
            words, me = segment.words, segment.me
            words[me + at.ASLEEP] = 1
            door = words[me + at.DOOR]
            self._step(True)  # what came before the others could see that this rank sleeps
        try:
            if not work.done:
                segment.sleep(door, seconds)
        finally:
            with self.lock:
                if segment.mapped is not None:
                    words[me + at.ASLEEP] = 0

    def aborted(self) -> bool:
        """Whether somebody raised the abort flag of this group."""
        with self.lock:
            return self.segment.mapped is not None and bool(self.segment.words[at.ABORT])

    def _examine(self, work: ShmWork, late: bool) -> None:
        """Fail what waits for ranks that never come, or did not come in time."""
        with self.lock:
            if work.done or self.segment.mapped is None:
                return
            waits_for = self._waits_for(work)
            reasons = [reason for other in waits_for if (reason := self.segment.gone(other))]
            if not reasons and not late:
                return
            self._step(True)  # what a peer did before it went still counts
            if work.done or self.error is not None:
                return
            if reasons:
                self._fail(PeerLost(f"shm: {reasons[0]}, in {work.label}"))
            else:
                names = ", ".join(str(self.segment.words[at.GLOBAL + other]) for other in self._waits_for(work))
                self._fail(PeerLost(f"shm: timed out waiting for peer rank {names} in {work.label}"))

    def _waits_for(self, work: ShmWork) -> list[int]:
        """The ranks (of this group) without which a call cannot go on."""
        if work.steps is None:
            return self.mail.waits_for(work)
        who, value = (self.queue[0] if self.queue else work).needs or (-1, 0)
        words, flags = self.segment.words, self.segment.flags
        return [other for other in self.segment.others if who in (-1, other) and words[flags[other]] < value]

    def hand_over(self) -> None:
        """Have the thread drive what is under way. Under the lock."""
        self._handed = time.monotonic()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mmlab-shm", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        looked = time.monotonic()
        while True:
            time.sleep(GRACE if not self._waiters else 5 * GRACE)
            with self.lock:
                if self.error is not None or self.segment.mapped is None:
                    self._thread = None
                    return
                busy = bool(self.queue) or self.mail.busy()
                if not busy and time.monotonic() - (self._handed or 0.0) > IDLE:
                    self._thread = None
                    return
                if busy and not self._waiters:
                    self._step(True)
            if busy and self.error is None and time.monotonic() - looked > LOOK:
                looked = time.monotonic()
                self._watch()

    def _watch(self) -> None:
        """For calls that nobody waits for by `wait` (futures): see that they end when they cannot finish."""
        with self.lock:
            works = [*list(self.queue)[:1], *self.mail.works()]
        if self._aborted_anywhere():
            with self.lock:
                self._fail(PeerLost("shm: the connection to the peers was aborted"))
        for work in works:
            self._examine(work, time.monotonic() > work.deadline)

    def _aborted_anywhere(self) -> bool:
        return self.aborted() or any(other.aborted() for other in self.siblings())

    def close(self) -> None:
        """Leave the group; what is still under way fails."""
        with self.lock:
            if self.segment.mapped is None:
                return
            self._fail(PeerLost("shm: the connection to the peers of this group is closed"))
            self.mail.close()
            self.segment.leave()
