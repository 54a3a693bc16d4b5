"""What ranks print: all of them or one, followed."""

from __future__ import annotations

from collections import deque
from typing import Any

from mmlab.tracking.logs import LogTail, clean
from mmlab.ui.panel import RunPanel
from mmlab.ui.source import RunSource

BLOCK_LINES = 50
BLOCK_CHARS = 8_000
"""Lines and characters of a block. Only the block that grows is sent again."""
BLOCKS = 24
"""Blocks that pages have: together at most 200 kB, whatever ranks print."""
MOST_LINES = 2_000
"""Lines of one rank that a page may ask for."""
TEXT_LINES = 20
"""Lines in a terminal."""

Line = list[Any]
"""[rank, text]"""


class Log(RunPanel):
    """What ranks print, with the rank before each line. The page chooses ranks, filters, and follows or stands still."""

    name = "log"
    title = "Log"
    every = 0.5
    slow = frozenset({"read"})
    lasting = True

    def __init__(self, source: RunSource) -> None:
        super().__init__(source)
        self._tails: dict[int, LogTail] = {}
        self._blocks: deque[tuple[int, list[Line]]] = deque(maxlen=BLOCKS)
        self._room = 0
        self._count = 0

    def frame(self) -> dict[str, Any]:
        """Roles by rank, and blocks of the last lines of all ranks under keys that come round again: "b0", "b1", ..., each
        {"number": from the run's start, "lines": [[rank, text]]}."""
        self._follow()
        roles = self.feed.roles()
        blocks = {f"b{number % BLOCKS}": {"number": number, "lines": list(lines)} for number, lines in self._blocks}
        return {"roles": roles, "name": self.feed.paths.root.name, "state": self.feed.state, **blocks}

    def _follow(self) -> None:
        """Take in what ranks have printed since."""
        for rank in range(len(self.feed.roles())):
            tail = self._tails.setdefault(rank, LogTail(self.feed.paths.log(rank)))
            for text in tail.read():
                self._take(rank, text)

    def _take(self, rank: int, text: str) -> None:
        if not self._blocks or len(self._blocks[-1][1]) >= BLOCK_LINES or self._room < len(text):
            self._blocks.append((self._count, []))
            self._count += 1
            self._room = BLOCK_CHARS
        self._room -= len(text)
        self._blocks[-1][1].append([rank, text])

    def handle(self, verb: str, args: dict[str, Any]) -> Any:
        """`read` {rank, lines}: the last lines of one rank, from rotated files too."""
        if verb != "read":
            raise ValueError(f"unknown request {verb!r}")
        rank, lines = int(args["rank"]), min(MOST_LINES, max(1, int(args.get("lines", MOST_LINES))))
        if not 0 <= rank < len(self.feed.roles()):
            raise ValueError(f"there is no rank {rank}; the run has {len(self.feed.roles())}")
        return {"lines": [clean(text) for text in self.source.run.log(rank, lines=lines).splitlines()]}

    def text(self) -> str:
        """The last lines."""
        self._follow()
        lines = [line for _, block in self._blocks for line in block][-TEXT_LINES:]
        return "\n".join(f"[{rank}] {text}" for rank, text in lines) or "no rank has printed anything yet"
