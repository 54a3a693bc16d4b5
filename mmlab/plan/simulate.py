"""Plays a schedule without engines: when each op would start and end, and whether any rank would wait for ever."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

from mmlab.plan.encoder_ops import returns_token_grads, tokens_need_grad
from mmlab.plan.layout import Layout
from mmlab.plan.ops import COMPUTE, PASSES, Op, Timed, Timeline
from mmlab.plan.schema import Plan
from mmlab.plan.sizes import step_costs

if TYPE_CHECKING:
    from mmlab.plan.schedule import Schedule

Costs = Mapping[tuple[int, str, int], float] | Mapping[tuple[int, str], float] | Mapping[str, float]
"""Duration of an op by kind, by (rank, kind), or by (rank, kind, model chunk); the unit is free. What is absent takes
no time."""


class DeadlockError(RuntimeError):
    """Ranks of a schedule wait for each other; the message names each with the op it waits in."""


def estimated_costs(plan: Plan) -> dict[tuple[int, str, int], float]:
    """Durations by (rank, kind, chunk) from operation counts, in units of one mean forward of a stage.

    Meant for pictures: the compute ops stand in the right proportion to each other; transfers take 0.02 and the ops at
    the end of the step 0.1, a guess that only makes them visible.
    """
    layout = Layout(plan)
    flops = step_costs(plan, layout)
    forwards = [cost for (_, kind, _), cost in flops.items() if kind == "forward"]
    unit = sum(forwards) / len(forwards)
    costs = {key: cost / unit for key, cost in flops.items()}
    for rank, chunk in product(range(layout.world_size), range(plan.parallel.chunks_per_rank)):
        for kind in ("send_tokens", "send_forward", "send_backward", "send_token_grads"):
            costs[rank, kind, chunk] = 0.02
        for kind in ("reduce", "reduce_embedding", "norm", "update"):
            costs[rank, kind, chunk] = 0.1
    return costs


class _Message(NamedTuple):
    """A transfer: the kind of the sending op, sender, receiver (-1 for all), microbatch, boundary between stages."""

    kind: str
    sender: int
    receiver: int
    microbatch: int
    boundary: int = 0


@dataclass
class _Player:
    """The state of a simulation: one clock and one position for each rank, and what has been sent."""

    ops: Sequence[Sequence[Op]]
    layout: Layout
    costs: Costs
    clock: list[float]
    at: list[int]
    sent: dict[_Message, float] = field(default_factory=dict)
    met: dict[tuple[str, int, int, int], dict[int, float]] = field(default_factory=dict)
    timeline: Timeline = field(default_factory=list)
    groups: dict[tuple[int, str], list[int]] = field(init=False)

    def __post_init__(self) -> None:
        kinds = {(rank, op.kind) for rank, ops in enumerate(self.ops) for op in ops}
        self.groups = {(rank, kind): self.group(rank, kind) for rank, kind in kinds}

    def cost(self, rank: int, op: Op) -> float:
        costs: Mapping[object, float] = self.costs  # type: ignore[assignment]
        keys: tuple[object, ...] = ((rank, op.kind, op.chunk), (rank, op.kind), op.kind)
        return next((costs[key] for key in keys if key in costs), 0.0)

    def group(self, rank: int, kind: str) -> list[int]:
        """The ranks that an op runs with, all of which must arrive; empty when the rank runs it alone."""
        layout = self.layout
        if kind == "norm":
            return list(range(layout.world_size))
        if kind == "reduce" and layout.place(rank).vision >= 0 and tokens_need_grad(layout.plan):
            return layout.vision_group  # holds the rank's replicas too, where it has a stage
        if layout.place(rank).role == "vision":
            return []
        groups = {
            "forward": layout.block_groups,
            "backward": layout.block_groups,
            "backward_input": layout.block_groups,
            "recv_tokens": layout.tp_groups if layout.plan.parallel.transfer == "all_gather" else [],
            "reduce": layout.language_groups,
            "reduce_embedding": layout.embedding_groups,
        }
        return layout.group_of(groups.get(kind, []), rank)

    def boundary(self, rank: int, op: Op) -> int:
        """What a transfer between two stages crosses: the lower of them, so that both sides name it alike."""
        if op.kind not in ("send_forward", "recv_forward", "send_backward", "recv_backward"):
            return 0
        stage = self.layout.stages.at(self.layout.place(rank).pp, op.chunk)
        return stage - (op.kind in ("recv_forward", "send_backward"))

    def sources(self, rank: int, op: Op) -> Iterator[_Message]:
        """What a receiving op waits for."""
        layout, place = self.layout, self.layout.place(rank)
        if op.kind == "recv_tokens":
            yield from (_Message("send_tokens", peer, -1, op.microbatch) for peer in layout.encoders_of(place.dp))
        elif op.kind == "recv_token_grads":
            merged = layout.plan.parallel.vision == "first_stage"
            for replica in [place.dp] if merged else range(layout.plan.parallel.dp):
                for peer in layout.token_ranks(replica):
                    if returns_token_grads(layout.plan, layout.place(peer)):
                        yield _Message("send_token_grads", peer, -1, op.microbatch)
        elif op.kind in ("recv_forward", "recv_backward"):
            kind = op.kind.replace("recv", "send")
            yield _Message(kind, op.peer, rank, op.microbatch, self.boundary(rank, op))

    def start(self, rank: int, op: Op) -> float | None:
        """When an op can start to run, None while what it needs has not happened."""
        arrivals = [self.sent.get(source) for source in self.sources(rank, op)]
        known = [time for time in arrivals if time is not None]
        if len(known) < len(arrivals):
            return None
        ready = max([self.clock[rank], *known])
        group = self.groups.get((rank, op.kind), [])
        if len(group) < 2:
            return ready
        here = self.met.setdefault((op.kind, group[0], op.microbatch, op.chunk), {})
        here.setdefault(rank, ready)
        return max(here.values()) if len(here) == len(group) else None

    def advance(self, rank: int) -> bool:
        """Run a rank's next op if it can start."""
        if self.at[rank] == len(self.ops[rank]):
            return False
        op = self.ops[rank][self.at[rank]]
        start = self.start(rank, op)
        if start is None:
            return False
        end = start + self.cost(rank, op)
        # A receive shows its wait; what ranks do together (compute, reductions) begins when the last has come.
        self.timeline[rank].append(Timed(op, self.clock[rank] if op.kind.startswith("recv") else start, end))
        if op.kind.startswith("send"):
            self.sent[_Message(op.kind, rank, op.peer, op.microbatch, self.boundary(rank, op))] = end
        self.clock[rank] = end
        self.at[rank] += 1
        return True


def simulate(schedule: Schedule, plan: Plan, costs: Costs | None = None) -> Timeline:
    """Play a schedule; sends do not wait for their receivers, tensor ranks compute together.

    `costs` gives durations (estimated where absent). Returns each rank's ops with start and end.
    Raises DeadlockError when ranks wait for each other.
    """
    ops = schedule.ops
    world = range(len(ops))
    player = _Player(
        ops,
        Layout(plan),
        estimated_costs(plan) if costs is None else costs,
        clock=[0.0 for _ in world],
        at=[0 for _ in world],
        timeline=[[] for _ in world],
    )
    moved = True
    while moved:
        moved = False
        for rank in world:
            while player.advance(rank):
                moved = True
    stuck = [rank for rank in world if player.at[rank] < len(ops[rank])]
    if stuck:
        waits = (f"rank {rank} in {ops[rank][player.at[rank]]}" for rank in stuck)
        raise DeadlockError("the schedule never ends: " + "; ".join(waits))
    return player.timeline


def dependencies(schedule: Schedule, plan: Plan) -> list[list[list[tuple[int, int]]]]:
    """For each op of each rank what it waits for elsewhere, as (rank, index of the op): the sends of what it receives,
    or the same op of the other ranks that run it together."""
    ops = schedule.ops
    player = _Player(ops, Layout(plan), {}, clock=[], at=[])
    sent: dict[_Message, tuple[int, int]] = {}
    met: dict[tuple[str, int, int, int], list[tuple[int, int]]] = {}

    def meeting(rank: int, op: Op) -> tuple[str, int, int, int]:
        group = player.groups[rank, op.kind]
        return (op.kind, group[0] if group else -1 - rank, op.microbatch, op.chunk)

    for rank, mine in enumerate(ops):
        for index, op in enumerate(mine):
            met.setdefault(meeting(rank, op), []).append((rank, index))
            if op.kind.startswith("send"):
                sent[_Message(op.kind, rank, op.peer, op.microbatch, player.boundary(rank, op))] = (rank, index)
    return [
        [
            [sent[source] for source in player.sources(rank, op)]
            or [other for other in met[meeting(rank, op)] if other[0] != rank]
            for op in mine
        ]
        for rank, mine in enumerate(ops)
    ]


def bubble(timeline: Timeline) -> float:
    """Share (0 to 1) of the stages' time without compute, from their first forward to their last compute op.

    Encoder ranks of their own are not counted: how long they have nothing to do says how many of them there are, not
    how well the pipeline is filled. What a stage's ranks encode counts as compute. 0 without any stage.
    """
    stages = [ops for ops in timeline if any(t.op.kind in PASSES for t in ops)]
    busy = [[t for t in ops if t.op.kind in COMPUTE] for ops in stages]
    if not busy:
        return 0.0
    span = max(t.end for ops in busy for t in ops) - min(t.start for ops in busy for t in ops)
    computed = sum(t.end - t.start for ops in busy for t in ops)
    return 1.0 - computed / (span * len(busy)) if span > 0 else 0.0


def measured_timeline(traces: Sequence[Mapping[str, Any]]) -> Timeline:
    """The timeline of a traced step, in seconds, from one record a rank: {"t0": epoch seconds, "ops": [[kind,
    microbatch, start, end, chunk], ...]} with times relative to t0 (no chunk: 0). Ranks are set against the earliest
    t0."""
    origin = min((trace["t0"] for trace in traces), default=0.0)
    return [
        [
            Timed(Op(kind, i, chunk=next(iter(chunk), 0)), trace["t0"] - origin + start, trace["t0"] - origin + end)
            for kind, i, start, end, *chunk in trace["ops"]
        ]
        for trace in traces
    ]
