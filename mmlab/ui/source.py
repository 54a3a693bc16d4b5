"""Where panels look: at a run's folder, once for all views of it in this kernel."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from mmlab.messages import Event
from mmlab.ui.feed import Feed

FRESH = 0.1
"""Seconds for which a look at the folder is good for other views too."""
LONG = 2 << 20
"""Bytes of a log from which it is read in slices: some 1,500 steps."""
SLICE = 0.04
"""Seconds that a look may take to read a long log: whoever asks meanwhile waits no longer than a person notices."""


class Source(Protocol):
    """What a part looks at."""

    lock: threading.RLock
    """Held while a part looks and makes its frames."""

    @property
    def state(self) -> str:
        """A word for how it stands; what cells hold is renewed when it becomes "paused", and at the end."""

    @property
    def ended(self) -> bool:
        """Whether nothing will change any more, as far as one can tell."""

    @property
    def reading(self) -> float | None:
        """The share of what there is to read that has been read, while that takes several looks; else None."""

    @property
    def cuts(self) -> int:
        """Counts up when what was told before no longer holds, so that pages need all of it anew."""

    def look(self) -> None:
        """Take in what is new."""


class RunSource:
    """A run and what its folder says so far."""

    def __init__(self, run: Any, run_dir: Path | str) -> None:
        self.run = run
        """The verbs (`mmlab.lab.Run`)."""
        self.feed = Feed(run_dir)
        self.lock = threading.RLock()
        self._listeners: list[Callable[[Event], None]] = []
        self._looked = float("-inf")

    @property
    def state(self) -> str:
        """The run's state."""
        return self.feed.state

    @property
    def ended(self) -> bool:
        """Whether the run is over."""
        return self.feed.ended

    @property
    def reading(self) -> float | None:
        """The share of a long log that has been read; None once all of it has."""
        return self.feed.reading

    @property
    def cuts(self) -> int:
        """How often the run went back."""
        return self.feed.cuts

    def look(self) -> None:
        """Read what is new in the folder, of a long log a slice; tell each event to those that listen."""
        with self.lock:
            if self.feed.reading is None and time.monotonic() - self._looked < FRESH:
                return
            self.feed.read(self._tell, SLICE if self.feed.unread > LONG else math.inf)
            self.feed.look()
            self._looked = time.monotonic()

    def listen(self, listener: Callable[[Event], None]) -> None:
        """Call with each event that is read from now on, on the thread that reads, under the lock."""
        self._listeners.append(listener)

    def unlisten(self, listener: Callable[[Event], None]) -> None:
        """Call no longer."""
        self._listeners = [one for one in self._listeners if one != listener]

    def _tell(self, event: Event) -> None:
        for listener in self._listeners:
            listener(event)
