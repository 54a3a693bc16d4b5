"""Where the ranks of a run are and how each of them is: hosts, roles, states, and what goes between them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from mmlab.messages import ENDED, PHASES
from mmlab.messages.beacon import BeaconState
from mmlab.messages.failures import Failure
from mmlab.plan.layout import Layout, Place
from mmlab.plan.placement import held
from mmlab.tracking.processes import process_state
from mmlab.tracking.tables import WINDOW, Table, mean
from mmlab.tracking.traffic import TrafficTable

if TYPE_CHECKING:
    from mmlab.plan import Plan

STATES = ("dead", "failed", "stopped", "slow", "waiting", "alive", "left", "absent")
"""How a rank can be, those that stand out first. dead: its process is gone; failed: it raised; stopped: by a signal;
slow: others wait for it, or it computes longer than those with the same work; waiting: for others, for long; left: the
run, as it should; absent: not there yet."""
BAD = STATES[:5]
WAITS = ("exchange", "pipeline", "reduce")
"""Phases in which a rank waits for others."""
PATIENT = ("start", "eval", "checkpoint", "control", "idle")
"""Phases that may take long."""
LONG = 5.0
"""Seconds in one phase from which a rank waits or is slow, or three steps where those are longer."""
SLOWER = 1.5
"""Times the median of the ranks with the same work from which a rank is slow, where that is a tenth of a step too."""
_OWN = [PHASES.index(phase) for phase in ("data", "encode", "forward", "backward", "optimizer")]


@dataclass(frozen=True)
class RankState:
    """One rank. `seconds`: how long it has been in its phase; `behind`: steps behind the foremost rank; `why`: a
    sentence where it is failed or slow; `holds`: what of the model it has."""

    rank: int
    role: str
    host: str
    engine: int | None
    pid: int
    state: str
    phase: str
    step: int
    microbatch: int
    seconds: float
    behind: int
    why: str
    holds: str

    @property
    def doing(self) -> str:
        """What it does, in words."""
        if self.state == "absent":
            return ""
        batch = f", microbatch {self.microbatch}" if self.microbatch >= 0 else ""
        since = f", for {self.seconds:.0f} s" if self.seconds >= LONG and self.state != "left" else ""
        return f"{self.phase} of step {self.step}{batch}{since}"

    @property
    def sentence(self) -> str:
        """How it is, with what it does or why."""
        return f"rank {self.rank} ({self.role}): {self.state}, {self.why or self.doing}"


@dataclass(frozen=True)
class Seen:
    """What is known of a run's ranks: its state, beacons, engines by rank, failures, last `step` events."""

    state: str
    beacons: Sequence[BeaconState]
    engines: Sequence[int]
    failures: Sequence[Failure]
    steps: Sequence[Mapping[str, Any]]


class Placement(Table):
    """Hosts with their ranks, and the groups that talk to each other; shows as a table.

    `ranks` are `RankState`s in rank order, `hosts` (name, ranks) in the order of their first rank, `traffic` the groups
    with bytes a step; `attention` are the ranks that are not as they should be, the worst first.
    """

    header = ("rank", "host", "role", "engine", "state", "what it does", "behind", "holds")
    nothing = "no ranks"

    def __init__(self, plan: Plan, seen: Seen) -> None:
        layout = plan.layout()
        self.state = seen.state
        self.traffic = TrafficTable(layout, seen.steps)
        self.ranks = list(_Judge(layout, seen).ranks())
        names = list(dict.fromkeys(rank.host for rank in self.ranks))
        self.hosts = [(name, [rank.rank for rank in self.ranks if rank.host == name]) for name in names]

    @property
    def attention(self) -> list[RankState]:
        """Ranks that stand out."""
        found = [rank for rank in self.ranks if rank.state in BAD]
        return sorted(found, key=lambda rank: (BAD.index(rank.state), rank.rank))

    @property
    def cells(self) -> list[tuple[str, ...]]:
        """A row a rank."""
        return [
            (
                str(r.rank),
                r.host,
                r.role,
                "" if r.engine is None else str(r.engine),
                r.state if r.state not in BAD else f"{r.state} !",
                r.why or r.doing,
                str(r.behind) if r.behind else "",
                r.holds,
            )
            for r in self.ranks
        ]

    @property
    def below(self) -> str:
        """What stands out, in sentences."""
        return "; ".join(rank.sentence for rank in self.attention)

    def __str__(self) -> str:
        return f"{super().__str__()}\n\n{self.traffic}"

    def html(self) -> str:
        """Both tables."""
        return super().html() + self.traffic.html()


def _what(failure: Failure) -> str:
    """Why a rank failed, without its name."""
    return failure.sentence().removeprefix(f"rank {failure.rank} ({failure.role}) ")


class _Judge:
    """Says how each rank is."""

    def __init__(self, layout: Layout, seen: Seen) -> None:
        self.layout, self.seen = layout, seen
        self.beacons = {beacon.rank: beacon for beacon in seen.beacons}
        self.foremost = max((beacon.step for beacon in seen.beacons), default=0)
        steps = [step for step in seen.steps if len(step.get("phases") or ()) == layout.world_size][-WINDOW:]
        self.seconds = mean(step["seconds"] for step in steps)
        self.long = max(LONG, 3 * self.seconds)
        self.own = [mean(sum(step["phases"][rank][i] for i in _OWN) for step in steps)
                    for rank in range(layout.world_size)]  # fmt: skip
        self.now = time.time()
        causes = [failure for failure in seen.failures if failure.kind != "peer"]
        self.failures = {failure.rank: failure for failure in causes}

    def ranks(self) -> Iterable[RankState]:
        states = {place.rank: self._state(place) for place in self.layout.places}
        waited = any(state == "waiting" for state, _ in states.values())
        for place in self.layout.places:
            state, why = states[place.rank]
            if state == "stuck":  # it should compute: the others wait for it, where any does
                state = "slow" if waited else "waiting"
            yield self._made(place, state, why)

    def _made(self, place: Place, state: str, why: str) -> RankState:
        beacon, engines = self.beacons.get(place.rank), self.seen.engines
        engine = engines[place.rank] if place.rank < len(engines) else None
        holds = held(self.layout, place)
        if beacon is None:
            return RankState(
                place.rank, place.label, f"node {place.node}", engine, 0, state, "", 0, -1, 0.0, 0, "", holds
            )
        behind = self.foremost - beacon.step if state != "left" else 0
        seconds = max(0.0, self.now - beacon.updated)
        return RankState(
            place.rank, place.label, beacon.host, engine, beacon.pid, state, beacon.phase, beacon.step,
            beacon.microbatch, seconds, behind, why, holds,
        )  # fmt: skip

    def _state(self, place: Place) -> tuple[str, str]:
        """State and why; "stuck" where it has been in one phase of its own for long."""
        beacon = self.beacons.get(place.rank)
        if beacon is None:
            return "absent", ""
        process, failure = process_state(beacon), self.failures.get(place.rank)
        if failure is not None and failure.kind == "lost":
            return "dead", _what(failure)
        if failure is not None:
            return "failed", _what(failure)
        if process == "gone":
            return "dead", ""
        if process == "left" or (process == "elsewhere" and self.seen.state in ENDED):
            return "left", ""
        if process == "stopped":
            return "stopped", ""
        if self.seen.state == "running" and self.now - beacon.updated > self.long and beacon.phase not in PATIENT:
            return ("waiting" if beacon.phase in WAITS else "stuck"), ""
        slower = self._slower(place)
        return ("slow", slower) if slower and self.seen.state == "running" else ("alive", "")

    def _slower(self, place: Place) -> str:
        """By how much a rank computes longer than those with the same work; empty where that is little."""
        peers = [other.rank for other in self.layout.places if (other.role, other.pp) == (place.role, place.pp)]
        others = [self.own[rank] for rank in peers if rank != place.rank]
        if not others or not self.seconds:
            return ""
        mine, usual = self.own[place.rank], median(others)
        if mine < SLOWER * usual or mine - usual < 0.1 * self.seconds:
            return ""
        like = "encoder ranks" if place.role == "vision" else "ranks of its stage"
        return f"it computes {1e3 * mine:.0f} ms a step, other {like} {1e3 * usual:.0f} ms"
