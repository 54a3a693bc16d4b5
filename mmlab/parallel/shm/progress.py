"""What a group has under way, and who drives it on.

A collective is a generator that yields whenever it has to wait for a flag of
another rank. Whoever waits for it drives it: first it yields the core, or spins
where others want the core, then it sleeps on a futex until a peer rings. What
nobody waits for (async calls, sends larger than a ring) is driven by a thread,
so it goes on while this rank computes.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta

from mmlab.messages import shared_file as at
from mmlab.parallel.shm.p2p import Mail
from mmlab.parallel.shm.segment import Segment, now
from mmlab.parallel.shm.work import PeerLost, ShmWork, Steps

YIELDS = 150
"""Looks at the flags, with the core yielded in between, before a waiter sleeps: about 400 microseconds on a free core.
Waking from a sleep takes 50 to 100: with 6 yields half of all 4 KB calls took twice as long (2 ranks: 61 instead of 33
us; 4 ranks on 2 cores: 407 instead of 215)."""
CROWD, CROWDED = 0.001, 5.0
"""A yield that takes so many seconds has met somebody who computes, and costs a whole slice of the scheduler's credit:
for so many seconds waiters only spin and then sleep. With yields alone steps took 1.8 times as long as on gloo on a
machine with load 12."""
SPIN, SPIN_SHARED = 100e-6, 10e-6
"""Seconds of that spinning: as long as waking takes; less in groups of more ranks than cores, who need them."""
NAP = 0.05
"""Seconds of a sleep that nobody ends. A bell rung in the very moment of falling asleep could be missed (never
seen); naps of 5 ms took 5 percent of two cores with five waiting ranks."""
LOOK = 0.2
"""Seconds between looks whether the peers still live."""
GRACE, IDLE = 0.001, 0.5
"""The driving thread leaves a new call to a waiter for GRACE seconds and ends after IDLE seconds without any."""
_OPS = {op: number for number, op in enumerate(at.OPS)}


class Progress:
    """The calls of one group on one rank: collectives in the order of their issue, and the mail between pairs."""

    def __init__(self, segment: Segment, timeout: timedelta, siblings: Callable[[], list[Progress]]) -> None:
        self.segment, self.timeout, self.siblings = segment, timeout.total_seconds(), siblings
        self.lock = threading.RLock()
        self.queue: deque[ShmWork] = deque()
        self.mail = Mail(segment)
        self.error: BaseException | None = None
        self.calls = 0
        self._waiters = 0
        self._handed = 0.0
        self._wanted = threading.Event()
        self._crowded = 0.0
        self._spin_seconds = SPIN if segment.layout.ranks <= (os.cpu_count() or 1) else SPIN_SHARED
        self._thread: threading.Thread | None = None

    def start(self, op: str, bytes_: int, work: ShmWork, steps: Callable[[int], Steps], background: bool) -> ShmWork:
        """Issue a collective; `steps(number)` makes its generator."""
        with self.lock:
            self._usable()
            self.calls += 1
            work.call = (op, bytes_, self.calls)
            work.deadline = time.monotonic() + self.timeout
            work.steps = steps(self.calls)
            self.queue.append(work)
            self.advance()
            if background and not work.done:
                self.hand_over()
        return work

    def _enter(self, op: str, bytes_: int, number: int, shape: tuple[int, ...]) -> None:
        """Record that this rank enters a call, for `read_calls`."""
        words, me = self.segment.words, self.segment.me
        words[me + at.CALL_OP], words[me + at.CALL_BYTES] = _OPS[op], bytes_
        words[me + at.CALL_TIME] = now()
        at.write_shape(words, me + at.CALL_SHAPE, shape)
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
                    self._enter(*work.call, work.shape)
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
            self._drive(work, deadline)
        finally:
            self._waiters -= 1
            if work.noted:
                self._note(work, False)

    def _note(self, work: ShmWork, waiting: bool) -> None:
        """Say for `read_calls` that this rank waits in a send or receive, or does no more."""
        if work.note is not None:
            work.noted = waiting
            with self.lock:
                if self.segment.mapped is not None:
                    self.mail.note(*work.note, work.shape, waiting)

    def _drive(self, work: ShmWork, deadline: float) -> None:
        if self._spin(work):
            return
        self._note(work, True)
        looked = time.monotonic()
        while not work.done:
            clock = time.monotonic()
            late = clock > deadline
            if late or clock - looked > LOOK:
                looked = clock
                self._heed_abort()  # first: a peer that was freed leaves the group
                self._examine(work, late)
            elif self.aborted():
                self._heed_abort()
            self._nap(work)

    def _spin(self, work: ShmWork) -> bool:
        """Wait for a call without sleeping, for a moment; whether it is complete."""
        mail = work.steps is None
        clock = time.perf_counter()
        if clock < self._crowded:
            end = clock + self._spin_seconds
            while not work.done and time.perf_counter() < end:
                self._step(mail)
            return work.done
        for _ in range(YIELDS):
            self._step(mail)
            if work.done:
                return True
            os.sched_yield()
            before, clock = clock, time.perf_counter()
            if clock - before > CROWD:
                self._crowded = clock + CROWDED
                break
        return False

    def _step(self, mail: bool) -> None:
        with self.lock:
            if self.error is None:
                if self.queue:
                    self.advance()
                if mail and self.error is None:
                    self.mail.pump()

    def _nap(self, work: ShmWork | None = None) -> None:
        """Sleep until a peer rings, if the call (any call) cannot go on without."""
        segment = self.segment
        with self.lock:
            if segment.mapped is None:
                if work is not None and not work.done:
                    self._fail(PeerLost("shm: the connection to the peers of this group is closed"))
                return
            words, me = segment.words, segment.me
            words[me + at.ASLEEP] += 1  # several threads may sleep
            door = words[me + at.DOOR]
            self._step(True)  # what came before the others could see that this rank sleeps
            ready = self.error is not None or (work.done if work is not None else not self._busy())
        try:
            if not ready:
                segment.sleep(door, NAP)
        finally:
            with self.lock:
                if segment.mapped is not None:
                    words[me + at.ASLEEP] -= 1

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
        self._wanted.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="mmlab-shm", daemon=True)
            self._thread.start()

    def _busy(self) -> bool:
        return bool(self.queue) or self.mail.busy()

    def _run(self) -> None:
        """Drive what nobody waits for. The bell that wakes a waiter wakes this thread too."""
        looked = time.monotonic()
        time.sleep(GRACE)
        while True:
            with self.lock:
                ended = self.error is not None or self.segment.mapped is None
                busy = not ended and self._busy()
                idle = not busy and time.monotonic() - self._handed > IDLE
                if ended or idle:
                    self._thread = None
                    return
            if not busy:
                self._wanted.wait(IDLE)
                self._wanted.clear()
                time.sleep(GRACE)
            elif self._waiters:
                time.sleep(5 * GRACE)
            else:
                self._nap()
            if busy and time.monotonic() - looked > LOOK:
                looked = time.monotonic()
                self._watch()

    def _watch(self) -> None:
        """For calls that nobody waits for by `wait` (futures): see that they end when they cannot finish."""
        with self.lock:
            works = [*list(self.queue)[:1], *self.mail.works()]
        self._heed_abort()
        for work in works:
            self._examine(work, time.monotonic() > work.deadline)

    def _heed_abort(self) -> None:
        """Fail what is under way if this group, or another one of this process, was aborted."""
        if not (self.aborted() or any(other.aborted() for other in self.siblings())):
            return
        with self.lock:
            if self.error is None and self.segment.mapped is not None:
                self._step(True)
                labels = {work.label for work in [*list(self.queue)[:1], *self.mail.works()]}
                where = f" in {', '.join(sorted(labels))}" if labels else ""
                self._fail(PeerLost(f"shm: the connection to the peers was aborted{where}"))

    def close(self) -> None:
        """Leave the group; what is still under way fails."""
        with self.lock:
            if self.segment.mapped is None:
                return
            self._fail(PeerLost("shm: the connection to the peers of this group is closed"))
            self.mail.close()
            self.segment.leave()
