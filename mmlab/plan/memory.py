"""What each rank's memory has to hold, as far as shapes alone can say."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from mmlab.plan.activations import activation_bytes
from mmlab.plan.layout import Layout, Place
from mmlab.plan.schedule import build_schedule
from mmlab.plan.schema import Plan
from mmlab.plan.sizes import Share, rank_share
from mmlab.plan.tables import html_table, size_text, text_table

MOST_PLAYED = 8_000
"""Ranks x microbatches x chunks up to which activations are computed: 0.2 s there (vlm-70b's 2,688 take 0.07)."""
ESTIMATE = (
    "Activations are the most that blocks, projector, output layer and loss keep for backward at once, by the "
    "schedule, with full sequences and weights in lower precision included; frozen modules and short samples keep less."
)
NO_ESTIMATE = "Activations are not counted: the plan has problems, or more microbatches than are played through here."
NOT_COUNTED = (
    "Not counted: what an op needs only while it runs, buckets and buffers of communication, decoded images, adapters' "
    "activations, and Python with torch itself (about 0.3 GB a process)."
)
_DEEPSPEED = "DeepSpeed shares out and offloads by itself; these are the figures without that."
_HEADERS = (
    "ranks",
    "what",
    "parameters",
    "weights",
    "gradients",
    "optimizer",
    "gathered",
    "left out",
    "activations",
    "sum",
)


@dataclass(frozen=True)
class Held:
    """What each of some ranks holds, in bytes (fp32)."""

    ranks: tuple[int, ...]
    what: str
    parameters: int
    weights: float
    gradients: float
    optimizer: float
    gathered: float
    """Weights and gradients that zero2 and zero3 hold whole besides while a step computes, at most."""
    residual: float
    """What compression with error feedback has left out."""
    activations: float | None
    """What forward keeps for backward at most; None where that is not known."""

    @property
    def state(self) -> tuple[float, float, float, float, float]:
        """Weights, gradients, optimizer, gathered, residual."""
        return self.weights, self.gradients, self.optimizer, self.gathered, self.residual

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.state) + (self.activations or 0.0)


class Memory:
    """The state of each rank in bytes: rows of ranks that hold the same; a table in text and in a notebook."""

    def __init__(self, plan: Plan) -> None:
        layout = Layout(plan)
        activations = _activations(plan, layout)
        shares = [
            (_what(layout, place), rank_share(plan, layout, place), kept, place.rank)
            for place, kept in zip(layout.places, activations, strict=True)
        ]
        grouped = groupby(sorted(shares, key=lambda one: one[0]), key=lambda one: one[:3])
        rows = [_held(what, share, kept, [one[3] for one in some]) for (what, share, kept), some in grouped]
        self.rows = sorted(rows, key=lambda row: row.ranks[0])
        """Ranks that hold the same, by their first rank."""
        known = NO_ESTIMATE if None in activations else ESTIMATE
        self.notes = [*([] if plan.parallel.engine == "native" else [_DEEPSPEED]), known, NOT_COUNTED]
        """What the figures are and leave out, in sentences."""

    @property
    def largest(self) -> Held:
        """The row that holds most."""
        return max(self.rows, key=lambda row: row.total)

    def _rows(self) -> list[list[str]]:
        return [
            [ranks_text(row.ranks), row.what, f"{row.parameters:,}"]
            + [bytes_text(count) for count in (*row.state, row.activations, row.total)]
            for row in self.rows
        ]

    def __str__(self) -> str:
        return "\n".join([text_table(_HEADERS, self._rows()), *self.notes])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return html_table(_HEADERS, self._rows()) + "".join(f"<p>{note}</p>" for note in self.notes)


def _activations(plan: Plan, layout: Layout) -> list[float | None]:
    """By rank; unknown where the plan is too large to be played, or broken."""
    if layout.world_size * plan.parallel.microbatches * plan.parallel.chunks_per_rank <= MOST_PLAYED:
        try:
            return [*activation_bytes(plan, layout, build_schedule(plan).ops)]
        except (ArithmeticError, LookupError, ValueError, RuntimeError):
            pass
    return [None] * layout.world_size


def _what(layout: Layout, place: Place) -> str:
    """What a rank is in the layout, whichever replica and share of a stage it has."""
    if place.role == "vision":
        return "encoder"
    return f"stage {place.pp}" + (" and encoder" if place.vision >= 0 else "")


def _held(what: str, share: Share, activations: float | None, ranks: list[int]) -> Held:
    weights, gradients, optimizer = (
        sum(getattr(piece, f"{kind}_bytes") for piece in share.pieces) for kind in ("weight", "gradient", "optimizer")
    )
    return Held(
        tuple(sorted(ranks)),
        what,
        share.parameters,
        weights,
        gradients,
        optimizer,
        share.gathered_bytes,
        share.residual_bytes,
        activations,
    )


def ranks_text(ranks: tuple[int, ...]) -> str:
    """Ranks in few characters: 0, 2-5."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def bytes_text(count: float | None) -> str:
    """Bytes in three digits: 1.2 GB, 34 MB; a dash for none, "?" for what is not known."""
    if count is None:
        return "?"
    return size_text(count) if count else "-"
