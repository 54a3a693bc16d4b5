"""A schedule as data for pages: lanes of ops, planned and measured, in the colours of the still pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmlab.plan import Plan
from mmlab.plan.bubbles import ideal_bubble, idle_shares
from mmlab.plan.ops import COMPUTE, Timeline
from mmlab.plan.picture import COLOURS, LETTERS, NAMES, TRANSFER
from mmlab.plan.schedule import bubble, rows_to_draw
from mmlab.plan.tables import html_table, text_table
from mmlab.tracking.traced import MeasuredSchedule

WAITS = ("recv_tokens", "recv_forward", "recv_backward", "recv_token_grads")
SENDS = ("send_tokens", "send_forward", "send_backward", "send_token_grads")
KINDS = (*LETTERS, *SENDS, *WAITS)
"""Kinds of ops; lanes name them by their index."""
DIGITS = 6
"""Digits after the point of times."""


def kinds() -> list[list[str]]:
    """For each of KINDS: kind, name in the legend, colour, letter, and its shape (compute, move or wait)."""
    found = []
    for kind in KINDS:
        shape = "wait" if kind in WAITS else "compute" if kind in COMPUTE or kind == "update" else "move"
        name = "wait, receive" if kind in WAITS else NAMES.get(kind, "send")
        found.append([kind, name, COLOURS.get(kind, TRANSFER), LETTERS.get(kind, ""), shape])
    return found


def rows(plan: Plan) -> dict[str, Any]:
    """The lanes: "rows" [[rank, label, whether it is the encoder's]] and how many ranks there are."""
    layout = plan.layout()
    drawn = [layout.place(rank) for rank in rows_to_draw(layout)]
    return {"rows": [[p.rank, p.label, p.role == "vision"] for p in drawn], "ranks": layout.world_size}


def lanes(timeline: Timeline, drawn: Sequence[int]) -> dict[str, Any]:
    """Ops of the drawn ranks [[index in KINDS, microbatch, chunk, start, end]], span, bubble, idle share of each."""
    idle = idle_shares(timeline)
    return {
        "ops": [
            [[KINDS.index(t.op.kind), t.op.microbatch, t.op.chunk, round(t.start, DIGITS), round(t.end, DIGITS)]
             for t in timeline[rank]]
            for rank in drawn
        ],
        "span": max((t.end for ops in timeline for t in ops), default=0.0),
        "bubble": bubble(timeline),
        "idle": [round(idle[rank], 4) for rank in drawn],
    }  # fmt: skip


def planned(plan: Plan) -> dict[str, Any]:
    """The schedule of a plan as estimated, with what each op waits for ("after": [[rank, index]] by lane and op), the
    bubble by the formula, and the lanes themselves."""
    schedule, drawn = plan.schedule(), rows_to_draw(plan.layout())
    after = schedule.dependencies()
    ideal = ideal_bubble(plan)
    p = plan.parallel
    return {
        "kinds": kinds(),
        **rows(plan),
        "about": {"plan": plan.name, "schedule": p.schedule, "p": p.pp, "m": p.microbatches, "v": p.chunks_per_rank},
        "ideal": None if ideal is None else ideal._asdict(),
        "after": [[[list(pair) for pair in some] for some in after[rank]] for rank in drawn],
        "planned": lanes(schedule.simulate(), drawn),
    }


def measured(found: MeasuredSchedule, estimated: Timeline) -> dict[str, Any]:
    """A measured step in seconds, with "scale", the seconds of the estimate's unit, and "replayed": the schedule played
    with the measured mean times."""
    drawn = rows_to_draw(found.plan.layout())
    return {
        "step": found.step,
        "scale": found.scale(estimated),
        **lanes(found.timeline, drawn),
        "replayed": lanes(found.planned(), drawn),
    }


def bubble_cells(plan: Plan, found: MeasuredSchedule | None) -> tuple[list[str], list[list[str]]]:
    """Header and rows: what share of the stages' time each rank does not compute, planned and measured, and in all."""
    layout, timeline = plan.layout(), plan.schedule().simulate()
    columns = [[*idle_shares(timeline), bubble(timeline)]]
    header = ["rank", "role", "not computing, as planned"]
    if found is not None:
        columns.append([*found.idle(), found.bubble()])
        header.append(f"as measured at step {found.step}")
    names = [[str(place.rank), place.label] for place in layout.places] + [["stages", "bubble"]]
    body = [[*name, *(f"{share:.1%}" for share in shares)] for name, *shares in zip(names, *columns, strict=True)]
    ideal = ideal_bubble(plan)
    if ideal is not None:
        given = [f"{ideal.share:.1%} = {ideal.formula}"]
        body.append(["formula", ideal.given, *given, *([""] if found is not None else [])])
    return header, body


def bubble_text(plan: Plan, found: MeasuredSchedule | None) -> str:
    """The table of bubbles as text."""
    return text_table(*bubble_cells(plan, found))


def bubble_html(plan: Plan, found: MeasuredSchedule | None) -> str:
    """The table of bubbles as HTML."""
    return html_table(*bubble_cells(plan, found))
