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
        if position.offset and position.window != self.order.window:
            raise DataError(
                f"data.shuffle_window = {self.order.window}: the saved position is {position.offset} samples into a "
                f"window of {position.window}. Set data.shuffle_window={position.window} to go on from there."
            )
        for key, value in position.settings:
            if get(self.plan, key) != value:
                raise self._refused(position, key, value)
        return replace(position, settings=())

    def _refused(self, position: Position, key: str, value: Any) -> DataError:
        kind, into = ("bucket", position.grouped) if position.grouped else ("shuffle", position.offset)
        return DataError(
            f"{key} = {_written(get(self.plan, key))}: the saved position is {into} samples into a {kind} window made "
            f"with {_written(value)}. Set {key}={_written(value)} to go on from there."
        )

    def leave(self, position: Position) -> Position:
        """A position as it is saved."""
        keys = _GROUPED if position.grouped else _SHUFFLED if position.offset else ()
        return replace(position, settings=tuple((key, get(self.plan, key)) for key in keys))


def _written(value: Any) -> str:
    """A value as it stands in a plan."""
    return str(value).lower() if isinstance(value, bool) else str(list(value) if isinstance(value, tuple) else value)
