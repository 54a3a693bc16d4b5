"""Whether a saved position of the data can be gone on from: inside a window only under what its samples depend on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mmlab.data.order import Order, Position
from mmlab.errors import DataError
from mmlab.plan.keys import get
from mmlab.plan.schema import Plan

_SHUFFLED = ("data.weights", "data.text_share")
"""What the samples of a shuffle window depend on beside its length."""
_GROUPED = (
    "data.bucket_window", "data.global_batch", "data.shuffle_window", *_SHUFFLED, "data.seq_len", "data.max_tiles",
    "data.thumbnail", "model.vision.image_size", "model.vision.patch_size",
)  # fmt: skip
"""What the steps of a bucket window depend on: its samples, and how long they are."""


def misfit(plan: Plan, position: Position) -> str:
    """What of a plan keeps a run from going on inside the windows that a saved position stands in; "" when nothing."""
    window = plan.data.shuffle_window
    if position.offset and position.window != window:
        return (
            f"data.shuffle_window = {window}: the saved position is {position.offset} samples into a window of "
            f"{position.window}. Set data.shuffle_window={position.window} to go on from there."
        )
    kind, into = ("bucket", position.grouped) if position.grouped else ("shuffle", position.offset)
    for key, value in position.settings:
        if (now := get(plan, key)) != value:
            return (
                f"{key} = {_written(now)}: the saved position is {into} samples into a {kind} window made with "
                f"{_written(value)}. Set {key}={_written(value)} to go on from there."
            )
    return ""


class Resume:
    """Judges positions that come in, and notes in those that go out what they depend on."""

    def __init__(self, plan: Plan, order: Order) -> None:
        self.plan, self.order = plan, order

    def enter(self, position: Position) -> Position:
        """A position as the order knows it. DataError when it is of other lanes, sources or windows."""
        saved, lanes = len(position.sources[0].positions), self.order.lanes
        if saved != lanes:
            raise DataError(
                f"data.lanes = {lanes}: the saved position is of {saved} lanes. Set data.lanes={saved} to go on from "
                "there."
            )
        if len(position.sources) != len(self.order.sources):
            raise DataError(
                f"data.sources: the saved position is of {len(position.sources)} sources, not of "
                f"{len(self.order.sources)} (with data.text_share, text and pictures are one each). Name the same "
                "sources in the same order to go on from there."
            )
        if problem := misfit(self.plan, position):
            raise DataError(problem)
        return replace(position, settings=())

    def leave(self, position: Position) -> Position:
        """A position as it is saved."""
        keys = _GROUPED if position.grouped else _SHUFFLED if position.offset else ()
        return replace(position, settings=tuple((key, get(self.plan, key)) for key in keys))


def _written(value: Any) -> str:
    """A value as it stands in a plan."""
    return str(value).lower() if isinstance(value, bool) else str(list(value) if isinstance(value, tuple) else value)
