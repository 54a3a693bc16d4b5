"""The run as a whole: its name, its batch, what trains."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mmlab.plan.problems import Fix, Problem
from mmlab.plan.schema import Plan

MAX_WINDOW = 1 << 16
"""Samples of a shuffle window: each is a Python object on each rank, and a new window takes a second at this size."""
MAX_LANES = 1024
"""Lanes beyond this make every manifest and checkpoint carry cursors without mixing samples any better."""


def name(plan: Plan) -> Iterator[Problem]:
    """The name becomes part of a folder's name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", plan.name):
        clean = re.sub(r"[^A-Za-z0-9._-]+", "-", plan.name).strip("-._")[:64] or "run"
        message = f"{plan.name!r} cannot be part of a folder's name: letters, digits, '.', '_' and '-', at most 64."
        yield Problem("name", message, Fix("rename the run", (f"name={clean}",)))


def batch(plan: Plan) -> Iterator[Problem]:
    """The global batch splits into replicas and microbatches."""
    d, p = plan.data, plan.parallel
    parts = p.dp * p.microbatches
    if d.global_batch % parts:
        size = -(-d.global_batch // parts) * parts
        message = f"{d.global_batch} samples do not split into dp {p.dp} x {p.microbatches} microbatches."
        yield Problem("data.global_batch", message, Fix("round it up", (f"data.global_batch={size}",)))


def sequence(plan: Plan) -> Iterator[Problem]:
    """A sample holds an image with some text, and the model admits it."""
    d, c, image = plan.data, plan.model.language, plan.model.vision.tokens_per_tile
    if d.seq_len < image + 2:
        length = image + 64
        message = f"{d.seq_len} tokens do not hold the {image} tokens of one image and text to predict."
        positions = (f"model.language.max_positions={length}",) if c.max_positions < length else ()
        yield Problem("data.seq_len", message, Fix("make room", (f"data.seq_len={length}", *positions)))
    elif d.seq_len > c.max_positions:
        message = f"{d.seq_len} tokens are more than model.language.max_positions {c.max_positions}."
        longer = image + 2 > c.max_positions
        key = f"model.language.max_positions={d.seq_len}" if longer else f"data.seq_len={c.max_positions}"
        yield Problem("data.seq_len", message, Fix("raise the model's" if longer else "shorten samples", (key,)))


def something_trains(plan: Plan) -> Iterator[Problem]:
    """At least one module has something to train."""
    t = plan.train
    if t.vision.frozen and t.projector.frozen and t.language.frozen:
        fix = Fix("train the projector at least", ("train.projector.frozen=false",))
        yield Problem("train.projector.frozen", "everything is frozen: nothing would be trained.", fix)


def mixture(plan: Plan) -> Iterator[Problem]:
    """Each source has a share, or none has."""
    d = plan.data
    if d.weights and len(d.weights) != len(d.sources):
        message = f"{len(d.weights)} weights for {len(d.sources)} sources."
        yield Problem("data.weights", message, Fix("mix by size", ("data.weights=[]",)))
    if d.shuffle_window > MAX_WINDOW:
        message = f"a window of {d.shuffle_window} samples is held by every rank; {MAX_WINDOW} mix as well."
        yield Problem("data.shuffle_window", message, Fix("shrink it", (f"data.shuffle_window={MAX_WINDOW}",)))


def lanes(plan: Plan) -> Iterator[Problem]:
    """A cursor a lane travels in every manifest and checkpoint."""
    if plan.data.lanes > MAX_LANES:
        message = f"{plan.data.lanes} lanes are more than {MAX_LANES}: each keeps a cursor in every checkpoint."
        yield Problem("data.lanes", message, Fix("use fewer", (f"data.lanes={MAX_LANES}",)))
