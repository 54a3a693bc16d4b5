"""What a panel is: one kind of view of a run, a lab or a plan. Thin: it says and asks what the API does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, ClassVar

from mmlab.ui.series import Series
from mmlab.ui.source import RunSource
from mmlab.ui.view import Points


@dataclass(frozen=True)
class Reply:
    """An answer with binary data; the page finds it as `answer.buffers` (DataViews)."""

    value: dict[str, Any]
    buffers: Sequence[bytes]


class Panel:
    """One panel. Its page side is the class that `static/panels/` registers as `PANELS[name]`.

    All but `handle` is called with the source's lock held, on the thread of a part.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    every: ClassVar[float] = 0.0
    """Seconds between frames at least; 0 for at each tick. What is costly should be rare."""
    slow: ClassVar[frozenset[str]] = frozenset()
    """Verbs of `handle` that take more than a tenth of a second: a thread of their own carries them out."""
    lasting: ClassVar[bool] = False
    """Whether the panel is of use after the run's end (else a picture takes its place then)."""

    spoken: ClassVar[tuple[str, ...]] = ()
    """Where frames and answers hold sentences, which pages in another language get translated (`language.spoken`)."""

    def frame(self) -> dict[str, Any]:
        """What it shows now (JSON). Only keys whose value has changed are sent."""
        raise NotImplementedError

    def curves(self) -> Mapping[str, Series]:
        """All curves it draws, for a page that has none yet. Names are common to all panels of a part."""
        return {}

    def points(self) -> Points | None:
        """Points that came since the last call; None when there are too many, so that pages take all anew."""
        return {}

    def handle(self, verb: str, args: dict[str, Any]) -> Any:
        """Carry out what a page asks, return the answer (JSON, or a `Reply`). Any thread; never waits for training.
        An MmlabError, ValueError or TypeError becomes the refusal that the page shows."""
        raise ValueError(f"unknown request {verb!r}")

    def text(self) -> str:
        """The same for a terminal."""
        raise NotImplementedError

    def html(self) -> str:
        """The same as still HTML, with its own colours, that reads on light and dark pages."""
        return f"<pre>{escape(self.text())}</pre>"

    def close(self) -> None:
        """Let go of what it holds."""


class RunPanel(Panel):
    """A panel of a run."""

    def __init__(self, source: RunSource) -> None:
        self.source = source

    @property
    def feed(self) -> Any:
        """What the run's folder says so far (`mmlab.ui.feed.Feed`)."""
        return self.source.feed
