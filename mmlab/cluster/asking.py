"""The kernel's side of cells on live ranks: to which engines they go, what comes back while they run, interrupts."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mmlab.cluster.cells import BEGAN, run_cell
from mmlab.errors import LabError, MmlabError

POLL = 0.03
"""Seconds between looks at what came."""
ANSWER = 10.0
"""Seconds that an engine may take to begin a cell: its main thread is free while it trains."""
UNWIND = 5.0
"""Seconds that an interrupted cell gets to end."""
MOST_RANKS = 100_000
"""Ranks that one text may name."""
OUTPUT = 2.0
"""Seconds for which the last output of a cell that has ended is waited for."""

Say = Callable[[int, str, bool], None]
"""Called with rank, line, and whether it was printed as an error."""
Show = Callable[[int, Mapping[str, Any]], None]
"""Called with rank and what it displayed: {mime type: data}."""


class CellFailed(MmlabError):
    """A cell failed on some ranks: one message that names each."""

    def _render_traceback_(self) -> list[str]:
        return [str(self)]


class CellInterrupted(KeyboardInterrupt):
    """A cell was interrupted; the run goes on."""

    def _render_traceback_(self) -> list[str]:
        """IPython's hook: one line instead of a traceback."""
        return [str(self)]


def parse_ranks(text: str) -> list[int] | None:
    """Ranks as written: "2", "0,2", "0-3,5"; None for all of them. LabError on anything else."""
    if text in ("", "all"):
        return None
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", part)
        if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
            raise LabError(f"{text!r} names no ranks; write one such as 2, several such as 0,2 or 0-3, or all")
        more = range(int(match[1]), int(match[2] or match[1]) + 1)
        if len(found) + len(more) > MOST_RANKS:
            raise LabError(f"{text!r} names more than {MOST_RANKS:,} ranks; all names those that there are")
        found += more
    return list(dict.fromkeys(found))


def engines_of(engines: Sequence[int], ranks: Iterable[int] | None) -> dict[int, int]:
    """Engine by rank. LabError for a rank that there is not."""
    wanted = list(range(len(engines)) if ranks is None else ranks)
    for rank in wanted:
        if rank >= len(engines):
            raise LabError(f"there is no rank {rank}; there are {len(engines)}, from 0 on")
    return {rank: engines[rank] for rank in wanted}


class Asked:
    """A cell on one rank."""

    def __init__(self, client: Any, rank: int, engine: int, source: str) -> None:
        self.client, self.rank, self.engine = client, rank, engine
        self.result = client.direct_view(engine).apply_async(run_cell, source)
        self.began = self.over = False
        self.problem = ""
        self.trace: list[str] = []
        self._told = {"stdout": 0, "stderr": 0}
        self._begun = {"stdout": "", "stderr": ""}
        self._displayed = 0

    def look(self, say: Say, show: Show) -> None:
        """Pass on what came; note how it ended."""
        ended = self.result.ready()
        if ended:
            self.result.wait_for_output(OUTPUT)
        came = self.result.metadata  # the client forgets its own of a result that is there
        self._stream("stdout", came, say, ended)
        self._stream("stderr", came, say, ended)
        outputs = list(came["outputs"])
        for output in outputs[self._displayed :]:
            show(self.rank, output["data"])
        self._displayed = len(outputs)
        if ended:
            self._end(show)

    def _stream(self, name: str, came: Mapping[str, Any], say: Say, ended: bool) -> None:
        text = came[name] or ""
        new, self._told[name] = text[self._told[name] :], len(text)
        if BEGAN in new:
            self.began = True
        new = new.replace(f"{BEGAN}\n", "").replace(BEGAN, "")
        *lines, self._begun[name] = (self._begun[name] + new).split("\n")
        if ended and self._begun[name]:
            lines.append(self._begun[name])
            self._begun[name] = ""
        for line in lines:
            say(self.rank, line, name == "stderr")

    def _end(self, show: Show) -> None:
        self.over = self.began = True
        try:
            found = self.result.get(timeout=0)
        except Exception as error:  # ipyparallel's own, of an engine that is gone or was never told
            self.problem = _lost(error)
            return
        if found.get("interrupted"):
            self.problem = "interrupted"
        elif "error" in found:
            self.problem, self.trace = found["error"], found["trace"]
        elif found["data"] is not None:
            show(self.rank, found["data"])

    def give_up(self) -> None:
        """Take the cell back where it has not begun, so that it does not come as a surprise later."""
        self.over, self.problem = True, f"does not answer: engine {self.engine} has been busy with something else"
        with contextlib.suppress(Exception):  # whatever ipyparallel says: nobody waits for it
            self.client.abort(self.result.msg_ids, targets=self.engine, block=False)

    def interrupt(self, processes: Mapping[int, Mapping[str, Any]]) -> None:
        """Raise KeyboardInterrupt in the cell: the engine ignores the signal at all other times, training goes on."""
        process = processes.get(self.engine)
        with contextlib.suppress(Exception):  # it may have ended meanwhile
            if process is not None and process["host"] == socket.gethostname():
                os.kill(process["pid"], signal.SIGINT)
            else:
                self.client.send_signal(int(signal.SIGINT), targets=self.engine, block=False)


def ask(
    view: Any, ranks: Mapping[int, int], source: str, processes: Mapping[int, Mapping[str, Any]], say: Say, show: Show,
    timeout: float = ANSWER,
) -> None:  # fmt: skip
    """Run a cell on the engines of ranks (`{rank: engine}`), passing on what they print as it comes.

    `processes` are the engines' {"pid", "host"} by engine. CellFailed names the ranks where it failed, or which do not
    answer within `timeout` seconds; CellInterrupted after an interrupt, which ends the cell everywhere.
    """
    client, there = view.client, set(view.client.ids)
    asked = [Asked(client, rank, engine, source) for rank, engine in ranks.items() if engine in there]
    gone = [rank for rank, engine in ranks.items() if engine not in there]
    end = time.monotonic() + timeout
    try:
        while any(not one.over for one in asked):
            _look(asked, say, show)
            if time.monotonic() > end:
                for one in asked:
                    if not (one.began or one.over):
                        one.give_up()
            time.sleep(POLL)
    except KeyboardInterrupt:
        raise CellInterrupted(_interrupted(asked, processes, say, show)) from None
    problems = [f"rank {rank}: its engine is gone" for rank in gone]
    for one in asked:
        if one.problem:
            problems.append("\n  ".join([f"rank {one.rank}: {one.problem}", *one.trace]))
    if problems:
        raise CellFailed("\n".join(problems))


def _look(asked: Iterable[Asked], say: Say, show: Show) -> None:
    for one in asked:
        if not one.over:
            one.look(say, show)


def _interrupted(asked: Sequence[Asked], processes: Mapping[int, Mapping[str, Any]], say: Say, show: Show) -> str:
    """Interrupt what still runs; what became of it."""
    running = [one for one in asked if not one.over]
    for one in running:
        if one.began:
            one.interrupt(processes)
        else:
            one.give_up()
    end = time.monotonic() + UNWIND
    while any(not one.over for one in running) and time.monotonic() < end:
        _look(running, say, show)
        time.sleep(POLL)
    stuck = [str(one.rank) for one in running if not one.over]
    text = f"interrupted the cell on rank {', '.join(str(one.rank) for one in running)}; the run goes on"
    return text + (f"; rank {', '.join(stuck)} has not come out of it yet" if stuck else "")


def _lost(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return f"its engine was lost ({text[0] if text else type(error).__name__})"
