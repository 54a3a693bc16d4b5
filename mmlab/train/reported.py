"""What the ranks tell each other about a step, in the reduction that the step makes anyway."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import astuple, dataclass, field

from torch import Tensor

from mmlab.messages import AXES, PHASES
from mmlab.parallel.gradients import Reducer
from mmlab.plan.schema import MODULES

_SIZES = (len(PHASES), len(AXES), len(MODULES), len(MODULES), 6 * len(MODULES), 1)
COLUMNS = sum(_SIZES)
"""Numbers in a rank's row."""


def row(phases: list[float], traffic: list[float], reducer: Reducer, queued: int) -> list[float]:
    """One rank's row: seconds of each phase, bytes of each axis, what its reducer knows of each module, and the steps
    that it has decoded ahead (-1 if it decodes none)."""
    overlap, coding = [reducer.overlap[m] for m in MODULES], [reducer.coding[m] for m in MODULES]
    times = [o.seconds for o in overlap] + [o.exposed for o in overlap]
    return [*phases, *traffic, *times, *(float(value) for c in coding for value in astuple(c)), queued]


@dataclass(frozen=True)
class Coded:
    """What compression did to one module's gradients in a step.

    `seconds` spent coding, on the rank where it was longest; `residual` the norm of what all ranks together have left
    out so far; `error` the relative error ||reduced - dense|| / ||dense|| of the reduced gradient, None in a step that
    did not measure it; `dense` bytes that its ranks would hand over without compression, `kept` bytes that they keep
    between steps.
    """

    seconds: float
    residual: float
    error: float | None
    dense: int
    kept: int


@dataclass(frozen=True)
class Reported:
    """What all ranks reported, equal on every rank.

    `phases` [world][phase] seconds; `traffic[axis]` bytes that each of `layout.groups(axis)` handed to communication
    since the step before reported; `communication[module]` (seconds, exposed): how long the module's gradients were
    under way and how long of it a rank waited, each on the rank where it was longest; `coding[module]` what compression
    cost and lost; `queued` steps that were decoded and waiting when the step asked for the next one, on the rank that
    had fewest (None where no rank decodes).
    """

    phases: list[list[float]] = field(default_factory=list)
    traffic: dict[str, list[int]] = field(default_factory=dict)
    communication: dict[str, tuple[float, float]] = field(default_factory=dict)
    coding: dict[str, Coded] = field(default_factory=dict)
    queued: int | None = None

    @classmethod
    def of(cls, rows: Tensor, groups: Mapping[str, list[list[int]]], compressing: Collection[str]) -> Reported:
        """From the ranks' rows [world, COLUMNS], of which there are none without telemetry."""
        if not rows.shape[0]:
            return cls()
        phases, traffic, seconds, exposed, coding, queued = rows.split(_SIZES, dim=1)
        sums = {
            axis: [int(column[group].sum()) for group in groups[axis]]
            for axis, column in zip(AXES, traffic.unbind(1), strict=True)
            if column.any()
        }
        longest = zip(MODULES, seconds.amax(0).tolist(), exposed.amax(0).tolist(), strict=True)
        communication = {m: (s, e) for m, s, e in longest if s}
        least = min((int(depth) for depth in queued.flatten().tolist() if depth >= 0), default=None)
        return cls(phases.tolist(), sums, communication, _coded(coding, compressing), least)


def _coded(rows: Tensor, compressing: Collection[str]) -> dict[str, Coded]:
    """Compression of each module that has to do with it, from the ranks' [world, 6 x modules]."""
    longest, sums = rows.amax(0).view(-1, 6)[:, 0].tolist(), rows.sum(0).view(-1, 6).tolist()
    found = {}
    for module, seconds, (_, residual, error, dense, whole, kept) in zip(MODULES, longest, sums, strict=True):
        if residual or (module in compressing and seconds):
            relative = math.sqrt(error / dense) if dense else None
            found[module] = Coded(seconds, math.sqrt(residual), relative, int(whole), int(kept))
    return found


@dataclass
class StepResult:
    """What a step gave, equal on every rank.

    `reported` is empty without telemetry. `overflow` names the modules of which a gradient (or "loss" if the loss
    itself) left fp16's range: the update was left out then. `loss_scale` is what the step's gradients were computed
    with.
    """

    loss: float
    targets: int
    grad_norm: dict[str, float]
    grad_norm_total: float
    lr: dict[str, float]
    commands: bool
    next_bad: frozenset[int]
    reported: Reported
    overflow: list[str]
    loss_scale: float
