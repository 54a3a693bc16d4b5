"""What ranks print: all of them or one, followed."""

from __future__ import annotations

from collections import deque
from itertools import accumulate
from typing import Any

from mmlab.tracking.logs import LogTail, clean
from mmlab.ui.panel import RunPanel
from mmlab.ui.source import RunSource

KEPT_LINES = 1_000
KEPT_CHARS = 100_000
"""Lines and characters of all ranks together that pages have. They are told by what came since."""
MOST_LINES = 2_000
"""Lines of one rank that a page may ask for."""
MOST_CHARS = 400_000
"""Characters of them: 2,000 of the longest lines would be 4 MB in one message."""
TEXT_LINES = 20
"""Lines in a terminal."""

Line = list[Any]
"""[rank, text]"""


class Log(RunPanel):
    """What ranks print, with the rank before each line. The page chooses, filters, and follows or stands still."""

    name = "log"
    title = "Log"
    every = 0.5
    slow = frozenset({"read"})
    lasting = True

    def __init__(self, source: RunSource) -> None:
        super().__init__(source)
        self._tails: dict[int, LogTail] = {}
        self._lines: deque[Line] = deque()
        self._chars = 0
        self._gone = 0

    def frame(self) -> dict[str, Any]:
        """Roles by rank; the last lines of all ranks, [rank, text] each, and the number of the first of them from when
        the log was first shown."""
        self._follow()
        return {
            "roles": self.feed.roles(),
            "state": self.feed.state,
            "first": self._gone,
            "lines": list(self._lines),
        }

    def _follow(self) -> None:
        """Take in what ranks have printed since."""
        for rank in range(len(self.feed.roles())):
            tail = self._tails.setdefault(rank, LogTail(self.feed.paths.log(rank)))
            for text in map(clean, tail.read()):
                self._lines.append([rank, text])
                self._chars += len(text)
        while len(self._lines) > KEPT_LINES or self._chars > KEPT_CHARS:
            self._chars -= len(self._lines.popleft()[1])
            self._gone += 1

    def handle(self, verb: str, args: dict[str, Any]) -> Any:
        """`read` {rank, lines}: the last lines of one rank, from rotated files too."""
        if verb != "read":
            raise ValueError(f"unknown request {verb!r}")
        rank, lines = int(args["rank"]), min(MOST_LINES, max(1, int(args.get("lines", MOST_LINES))))
        if not 0 <= rank < len(self.feed.roles()):
            raise ValueError(f"there is no rank {rank}; the run has {len(self.feed.roles())}")
        found = [clean(text) for text in self.source.run.log(rank, lines=lines).splitlines()]
        room = accumulate(len(text) for text in reversed(found))
        return {"lines": found[len(found) - sum(used <= MOST_CHARS for used in room) :]}

    def text(self) -> str:
        """The last lines."""
        self._follow()
        lines = list(self._lines)[-TEXT_LINES:]
        return "\n".join(f"[{rank}] {text}" for rank, text in lines) or "no rank has printed anything yet"
