"""What each rank's memory has to hold, as far as shapes alone can say."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from mmlab.plan.layout import Layout, Place
from mmlab.plan.schema import Plan
from mmlab.plan.sizes import Share, rank_share
from mmlab.plan.tables import html_table, text_table

NOT_COUNTED = (
    "Not counted: activations (most of the memory with long sequences or large microbatches, less with "
    "train.activation_checkpointing), copies in lower precision, buckets and buffers, decoded images, and Python with "
    "torch itself (about 0.3 GB a process)."
)
_DEEPSPEED = "DeepSpeed shares out and offloads by itself; these are the figures without that."
_HEADERS = ("ranks", "what", "parameters", "weights", "gradients", "optimizer", "gathered", "left out", "sum")


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

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.gathered + self.residual


class Memory:
    """The state of each rank in bytes: rows of ranks that hold the same; a table in text and in a notebook."""

    def __init__(self, plan: Plan) -> None:
        layout = Layout(plan)
        shares = [(_what(layout, place), rank_share(plan, layout, place), place.rank) for place in layout.places]
        grouped = groupby(sorted(shares, key=lambda one: one[0]), key=lambda one: one[:2])
        self.rows = sorted(
            (_held(what, share, [one[2] for one in some]) for (what, share), some in grouped), key=_first
        )
        """Ranks that hold the same, by their first rank."""
        self.notes = [NOT_COUNTED] if plan.parallel.engine == "native" else [_DEEPSPEED, NOT_COUNTED]
        """What the figures leave out, in sentences."""

    @property
    def largest(self) -> Held:
        """The row that holds most."""
        return max(self.rows, key=lambda row: row.total)

    def _rows(self) -> list[list[str]]:
        return [
            [ranks_text(row.ranks), row.what, f"{row.parameters:,}"]
            + [
                bytes_text(count)
                for count in (row.weights, row.gradients, row.optimizer, row.gathered, row.residual, row.total)
            ]
            for row in self.rows
        ]

    def __str__(self) -> str:
        return "\n".join([text_table(_HEADERS, self._rows()), *self.notes])

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return html_table(_HEADERS, self._rows()) + "".join(f"<p>{note}</p>" for note in self.notes)


def _first(row: Held) -> int:
    return row.ranks[0]


def _what(layout: Layout, place: Place) -> str:
    """What a rank is in the layout, whichever replica and share of a stage it has."""
    if place.role == "vision":
        return "encoder"
    return f"stage {place.pp}" + (" and encoder" if place.vision >= 0 else "")


def _held(what: str, share: Share, ranks: list[int]) -> Held:
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


def bytes_text(count: float) -> str:
    """Bytes in three digits: 1.2 GB, 34 MB; a dash for none."""
    for name, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {name}"
    return f"{count:.0f} B" if count else "-"
