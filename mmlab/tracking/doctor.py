"""What a stuck run waits for: which rank has not joined which call of which group, and where it is in its code.

Looks from outside, at beacons, processes, the shared files of groups and the answers of control threads; the ranks
may hang, and the kernel that started the run may be dead. Changes nothing about the run.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path

from mmlab.messages.shared_file import GroupCalls, RankCalls, read_calls
from mmlab.messages.stacks import Frame, RankStack, ask, read_dump, wait_answers
from mmlab.tracking.processes import process_state
from mmlab.tracking.record import ENDED, RunRecord

ANSWERS = 1.5
"""Seconds that control threads get to answer; they look every 0.1 s, and longer on a crowded machine."""
_LIBRARY = re.compile(r"[/\\]lib[/\\]python3\.\d+[/\\](?!site-packages)|[/\\]site-packages[/\\]torch[/\\]|^<")
_OWN = re.compile(r"[/\\]mmlab[/\\]parallel[/\\]shm[/\\]")


@dataclass(frozen=True)
class Wait:
    """A call that a rank cannot finish: number (0 where the backend counts none), shape, and whom it waits for."""

    rank: int
    op: str
    number: int
    shape: tuple[int, ...]
    group: str
    members: tuple[int, ...]
    missing: tuple[int, ...]
    seconds: float | None = None

    @property
    def call(self) -> str:
        """The call in words."""
        number = f" #{self.number}" if self.number else ""
        shape = f" of {list(self.shape)}" if self.shape else ""
        return f"{self.op}{number}{shape} in group {self.group} ({_ranks(self.members)})"


@dataclass(frozen=True)
class RankView:
    """One rank: `process` is alive, stopped, gone, left (the run) or elsewhere (another host); `where` its line."""

    rank: int
    role: str
    process: str
    phase: str
    step: int
    microbatch: int
    seconds: float
    frames: tuple[Frame, ...]

    @property
    def where(self) -> str:
        """The innermost line of code that is neither torch's nor the library's."""
        ours = (f for f in self.frames if not _LIBRARY.search(f[0]) and not _OWN.search(f[0]))
        frame = next(ours, next(iter(self.frames), None))
        return "" if frame is None else f"{_short(frame[0])}:{frame[1]} in {frame[2]}"

    @property
    def doing(self) -> str:
        """What it does since when, in words."""
        batch = f", microbatch {self.microbatch}" if self.microbatch >= 0 else ""
        return f"{self.phase} of step {self.step}{batch}, for {self.seconds:.1f} s"


def _short(file: str) -> str:
    """A path in few characters: from the package on, or from here."""
    for mark in ("/site-packages/", "/mmlab/"):
        _, found, tail = file.rpartition(mark)
        if found:
            return f"mmlab/{tail}" if mark == "/mmlab/" else tail
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file


def _ranks(ranks: Iterable[int]) -> str:
    numbers = list(ranks)
    return ("rank " if len(numbers) == 1 else "ranks ") + ", ".join(map(str, numbers))


class Diagnosis:
    """What holds a run up. Shows as text, in a notebook as a table.

    `missing`: ranks that others wait for and that wait for nobody; `waits`: every call that cannot finish; `ranks`.
    """

    def __init__(self, run: str, state: str, ranks: list[RankView], waits: list[Wait], idle: float | None) -> None:
        self.run, self.state, self.ranks, self.waits, self.idle = run, state, ranks, waits, idle
        waiting = {wait.rank for wait in waits}
        wanted = {rank for wait in waits for rank in wait.missing}
        halted = {rank.rank for rank in ranks if rank.process in ("stopped", "gone")}
        self.missing = sorted((wanted - waiting) | halted)

    def _lines(self) -> list[str]:
        """What is wrong, a sentence a line."""
        views = {view.rank: view for view in self.ranks}
        lines = []
        for rank in self.missing:
            view = views.get(rank)
            role = f" ({view.role})" if view else ""
            for call, waits in self._calls(rank).items():
                longest = max((w.seconds for w in waits if w.seconds is not None), default=None)
                since = f" for {longest:.1f} s" if longest is not None else ""
                who = _ranks(w.rank for w in waits)
                if waits[0].op in ("send", "recv"):
                    lines.append(f"rank {rank}{role} is waited for by {who}: {call}{since}")
                else:
                    held = f"{who} waits{since}" if len(waits) == 1 else f"{who} wait{since}"
                    lines.append(f"rank {rank}{role} has not joined {call}, where {held}")
            if view is not None:
                process = {"stopped": "its process is stopped (SIGSTOP); ", "gone": "its process has ended; "}
                found = f"  {process.get(view.process, '')}it is in {view.doing}"
                lines.append(f"{found} at {view.where}" if view.where else found)
        if self.waits and not self.missing:
            lines.append("the ranks wait for one another:")
            lines += [f"  rank {w.rank} waits for {_ranks(w.missing)} in {w.call}" for w in self.waits]
        return lines or [self._calm()]

    def _calls(self, rank: int) -> dict[str, list[Wait]]:
        found: dict[str, list[Wait]] = {}
        for wait in self.waits:
            if rank in wait.missing:
                found.setdefault(wait.call, []).append(wait)
        return found

    def _calm(self) -> str:
        if not self.ranks:
            return "no rank of it is at work"
        return "no rank waits for another one just now"

    def _head(self) -> str:
        idle = f"; the last step ended {self.idle:.1f} s ago" if self.idle is not None else ""
        return f"run {self.run}: {self.state}{idle}"

    def _advice(self) -> str:
        stuck = self.state not in ENDED and (self.waits or self.missing)
        return (
            f"run.abort() (mmlab abort {self.run}) frees the ranks and ends the run; engines live on" if stuck else ""
        )

    @property
    def findings(self) -> str:
        """What is wrong, in one line."""
        return "; ".join(line.strip() for line in self._lines())

    @property
    def text(self) -> str:
        """The diagnosis as lines of text."""
        rows = [self._head(), *self._lines()]
        for view in self.ranks:
            waits = [w for w in self.waits if w.rank == view.rank]
            what = "; ".join(f"waits for {_ranks(w.missing)} in {w.call}" for w in waits) or view.doing
            who = view.role if view.process == "alive" else f"{view.role} [{view.process}]"
            row = f"  rank {view.rank}  {who}: {what}"
            rows.append(f"{row}  {view.where}" if view.where else row)
        return "\n".join([*rows, *filter(None, [self._advice()])])

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        lines = "<br>".join(escape(line) for line in [self._head(), *self._lines()])
        rows = []
        for view in self.ranks:
            waits = "<br>".join(escape(f"{w.call}, for {_ranks(w.missing)}") for w in self.waits if w.rank == view.rank)
            cells = (str(view.rank), view.role, view.process, view.doing, view.where)
            mark = ' style="font-weight:bold"' if view.rank in self.missing else ""
            rows.append(f"<tr{mark}>" + "".join(f"<td>{escape(c)}</td>" for c in cells) + f"<td>{waits}</td></tr>")
        heads = "".join(f"<th>{head}</th>" for head in ("rank", "role", "process", "does", "code", "waits in"))
        advice = f"<p>{escape(self._advice())}</p>" if self._advice() else ""
        return f"<p>{lines}</p><table><tr>{heads}</tr>{''.join(rows)}</table>{advice}"


def diagnose(record: RunRecord, seconds: float = ANSWERS) -> Diagnosis:
    """Look at a run; takes up to about `seconds` longer when ranks do not answer."""
    status, now = record.status(), time.time()
    last = record.last_step()
    idle = now - last["t"] if last is not None and status["state"] not in ENDED else None
    beacons = [beacon for beacon in record.beacons() if status["state"] not in ENDED]
    processes = {beacon.rank: process_state(beacon) for beacon in beacons}
    able = [beacon.rank for beacon in beacons if processes[beacon.rank] in ("alive", "elsewhere")]
    try:
        answers = wait_answers(record.paths.ranks, able, ask(record.paths.ranks), seconds) if able else {}
    except OSError:
        answers = {}  # the folder cannot be written; what can be seen from outside is still seen
    views = []
    for beacon in beacons:
        frames = answers[beacon.rank].frames if beacon.rank in answers else ()
        if not frames and processes[beacon.rank] == "alive":
            frames = read_dump(record.paths.ranks, beacon.rank, beacon.pid, seconds)
        views.append(
            RankView(beacon.rank, beacon.role, processes[beacon.rank], beacon.phase, beacon.step, beacon.microbatch,
                     max(0.0, now - beacon.updated), frames)
        )  # fmt: skip
    halted = {rank for rank, process in processes.items() if process in ("stopped", "gone")}
    groups: dict[int, GroupCalls] = {}
    for beacon in beacons:
        if processes[beacon.rank] in ("alive", "stopped"):
            groups |= {group.file: group for group in read_calls(beacon.pid)}
    waits = [*_shared_waits(groups.values(), halted), *_counted_waits(answers, groups.values())]
    return Diagnosis(record.id, status["state"], views, sorted(waits, key=lambda w: w.rank), idle)


def _shared_waits(groups: Iterable[GroupCalls], halted: set[int]) -> Iterable[Wait]:
    """Calls that cannot finish by the records in the shared files of groups."""
    now = time.time()
    for group in groups:
        if group.aborted:
            continue
        members = tuple(rank.rank for rank in group.ranks)
        for mine in group.ranks:
            if mine.closed:
                continue
            if mine.entered > mine.done and (missing := _absent(mine, group.ranks, halted)):
                yield Wait(mine.rank, mine.op, mine.entered, mine.shape, group.group, members, missing, now - mine.time)
            if mine.p2p is not None:
                op, peer, _, _, since = mine.p2p
                missing = (peer,) if peer >= 0 else tuple(rank for rank in members if rank != mine.rank)
                yield Wait(mine.rank, op, 0, mine.p2p_shape, group.group, members, missing, now - since)


def _absent(mine: RankCalls, everyone: tuple[RankCalls, ...], halted: set[int]) -> tuple[int, ...]:
    """Ranks that have not entered a rank's call; else those that cannot go on within it."""
    late = tuple(rank.rank for rank in everyone if rank.entered < mine.entered)
    return late or tuple(rank.rank for rank in everyone if rank.done < mine.entered and rank.rank in halted)


def _counted_waits(answers: dict[int, RankStack], shared: Iterable[GroupCalls]) -> Iterable[Wait]:
    """Calls that cannot finish by what ranks answered, in groups without a shared file (gloo, NCCL)."""
    known = {(group.group, tuple(rank.rank for rank in group.ranks)) for group in shared}
    calls: dict[tuple[str, tuple[int, ...]], dict[int, int]] = {}
    for rank, found in answers.items():
        for group in found.groups:
            calls.setdefault((group.name, group.ranks), {})[rank] = group.calls
    for rank, found in answers.items():
        inside = found.inside
        if inside is None:
            continue
        for (name, members), counts in calls.items():
            if name != inside.group or rank not in counts or (name, members) in known:
                continue
            if inside.op in ("send", "recv"):
                missing = (inside.peer,) if inside.peer >= 0 else tuple(r for r in members if r != rank)
                yield Wait(rank, inside.op, 0, inside.shape, name, members, missing)
            elif missing := tuple(r for r in members if counts.get(r, -1) < counts[rank]):
                yield Wait(rank, inside.op, counts[rank], inside.shape, name, members, missing)
