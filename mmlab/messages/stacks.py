"""Where a rank is in its code: asked for by a file, answered by the rank's control thread, read without torch.

`<run>/ranks/ask.json` holds the number of the last question. Each rank writes `ranks/rank-N.stack.json` in reply,
which works while its training thread is stuck in a call. A rank whose interpreter is blocked (some C code holds its
lock) cannot; `ranks/rank-N.dump` is where its signal handler (`faulthandler`, SIGUSR2) writes the stacks then.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from mmlab.messages.files import read_json, write_json

Frame = tuple[str, int, str]
"""File, line, function."""
DUMP_SIGNAL = getattr(signal, "SIGUSR2", None)
"""The signal on which a rank writes its stacks; None where there is none such."""
_THREAD = re.compile(r"^(?:Current t|T)hread 0x([0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
POLL = 0.02


@dataclass(frozen=True)
class Inside:
    """The torch.distributed call that the training thread is in: `peer` and `tag` of a message, else -1."""

    op: str
    group: str
    shape: tuple[int, ...] = ()
    peer: int = -1
    tag: int = 0


@dataclass(frozen=True)
class GroupCount:
    """How many calls a rank has issued in a group of world ranks; `name` what it is for."""

    name: str
    ranks: tuple[int, ...]
    calls: int


@dataclass(frozen=True)
class RankStack:
    """One rank's answer: the frames of its training thread, innermost first, the call it is in, and its groups."""

    rank: int
    generation: int
    question: str
    time: float
    frames: tuple[Frame, ...]
    inside: Inside | None = None
    groups: tuple[GroupCount, ...] = ()
    others: dict[str, tuple[Frame, ...]] = field(default_factory=dict)
    """Frames of the other threads by name."""


def ask(ranks: Path) -> str:
    """Ask all ranks of a run; the question's name. OSError when the run's folder cannot be written."""
    question = secrets.token_hex(8)
    write_json(ranks / "ask.json", {"question": question, "time": time.time()})
    return question


def asked(ranks: Path) -> str:
    """The last question; empty when there was none."""
    found = read_json(ranks / "ask.json")
    return str(found.get("question", "")) if isinstance(found, dict) else ""


def answer(ranks: Path, stack: RankStack) -> None:
    """Write a rank's answer."""
    write_json(ranks / f"rank-{stack.rank}.stack.json", asdict(stack))


def read_answer(ranks: Path, rank: int) -> RankStack | None:
    """A rank's last answer; None where there is none."""
    found = read_json(ranks / f"rank-{rank}.stack.json")
    if not isinstance(found, dict):
        return None
    inside = found.pop("inside")
    groups = tuple(GroupCount(g["name"], tuple(g["ranks"]), g["calls"]) for g in found.pop("groups"))
    frames = tuple(tuple(frame) for frame in found.pop("frames"))
    others = {name: tuple(tuple(frame) for frame in rows) for name, rows in found.pop("others").items()}
    where = None if inside is None else Inside(**inside | {"shape": tuple(inside["shape"])})
    return RankStack(frames=frames, inside=where, groups=groups, others=others, **found)


def wait_answers(ranks: Path, wanted: list[int], question: str, seconds: float) -> dict[int, RankStack]:
    """The answers of some ranks to a question, as many as come within some seconds."""
    end = time.monotonic() + seconds
    found: dict[int, RankStack] = {}
    while True:
        for rank in wanted:
            if rank not in found:
                reply = read_answer(ranks, rank)
                if reply is not None and reply.question == question:
                    found[rank] = reply
        if len(found) == len(wanted) or time.monotonic() > end:
            return found
        time.sleep(POLL)


def dump_path(ranks: Path, rank: int) -> Path:
    """Where a rank's signal handler writes; its first line names process and training thread."""
    return ranks / f"rank-{rank}.dump"


def read_dump(ranks: Path, rank: int, pid: int, seconds: float) -> tuple[Frame, ...]:
    """Signal a rank of this host to write its stacks; the frames of its training thread. Empty where it cannot.

    Only a process that has said in its dump file that it handles the signal is signalled: others would end.
    """
    path = dump_path(ranks, rank)
    try:
        with open(path) as file:
            head = file.readline().split()
        if DUMP_SIGNAL is None or len(head) != 2 or int(head[0]) != pid:
            return ()
        before = path.stat().st_size
        os.kill(pid, DUMP_SIGNAL)
        end, size = time.monotonic() + seconds, before
        while time.monotonic() < end:
            time.sleep(2 * POLL)
            now = path.stat().st_size
            if now == size > before:
                break
            size = now
        with open(path, "rb") as file:
            file.seek(before)
            text = file.read().decode(errors="replace")
    except (OSError, ValueError):
        return ()
    return _frames(text, int(head[1], 16))


def _frames(text: str, thread: int) -> tuple[Frame, ...]:
    """The frames of one thread in what `faulthandler` wrote."""
    found: list[Frame] = []
    here = False
    for line in text.splitlines():
        if header := _THREAD.match(line):
            here = int(header[1], 16) == thread
        elif here and (frame := _FRAME.match(line)):
            found.append((frame[1], int(frame[2]), frame[3]))
    return tuple(found)
