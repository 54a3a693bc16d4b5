"""What a rank tells whoever asks where it is: its stacks, the call it is in, and how many calls it made in each group.

Everything here runs in the rank's control thread, while the training thread may be stuck in a call.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from mmlab.messages.stacks import (
    DUMP_SIGNAL,
    Frame,
    GroupCount,
    Inside,
    RankStack,
    answer,
    asked,
    dump_path,
)

_OPS = (
    "all_reduce", "all_gather_into_tensor", "all_gather", "reduce_scatter_tensor", "reduce_scatter", "broadcast",
    "all_to_all_single", "all_to_all", "gather", "scatter", "reduce", "barrier", "send", "recv", "isend", "irecv",
)  # fmt: skip
"""Functions of torch.distributed that stand for a call; they have the same locals in torch 2.13."""
_TENSORS = ("tensor", "input_tensor", "input", "output_tensor", "output")


class Vitals:
    """Answers questions about one rank. Made in the training thread; `dump_to` stays open for the signal handler."""

    def __init__(self, ranks: Path, rank: int, generation: int) -> None:
        self.ranks, self.rank, self.generation = ranks, rank, generation
        self.thread = threading.get_ident()
        self._answered = asked(ranks)
        self._listen_to_signal()

    def _listen_to_signal(self) -> None:
        """Have a signal write the stacks, for when no Python code can run. Stays when the run ends: without a handler
        the signal would end the process."""
        if DUMP_SIGNAL is None:
            return
        with contextlib.suppress(OSError, RuntimeError):
            file = open(dump_path(self.ranks, self.rank), "w")  # noqa: SIM115  faulthandler keeps and closes it
            file.write(f"{os.getpid()} {self.thread:x}\n")
            file.flush()
            faulthandler.register(DUMP_SIGNAL, file, all_threads=True)

    def look(self) -> None:
        """Answer a new question."""
        question = asked(self.ranks)
        if not question or question == self._answered:
            return
        self._answered = question
        with contextlib.suppress(OSError):
            answer(self.ranks, self.take(question))

    def take(self, question: str = "") -> RankStack:
        """Where this rank is right now."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = sys._current_frames()
        mine = stacks.pop(self.thread, None)
        others = {
            names.get(ident, str(ident)): _walk(frame)
            for ident, frame in stacks.items()
            if names.get(ident, "").startswith("mmlab")
        }
        return RankStack(
            self.rank, self.generation, question, time.time(), _walk(mine), _inside(mine), _groups(), others
        )  # fmt: skip


def _walk(frame: FrameType | None) -> tuple[Frame, ...]:
    """Frames from the innermost outwards."""
    found: list[Frame] = []
    while frame is not None:
        found.append((frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name))
        frame = frame.f_back
    return tuple(found)


def _inside(frame: FrameType | None) -> Inside | None:
    """The innermost call of torch.distributed on the stack, with what its arguments say."""
    while frame is not None:
        if frame.f_code.co_filename == distributed_c10d.__file__ and frame.f_code.co_name in _OPS:
            return _call(frame.f_code.co_name, frame.f_locals)
        frame = frame.f_back
    return None


def _call(op: str, arguments: dict[str, Any]) -> Inside:
    group: Any = arguments.get("group") or dist.group.WORLD
    tensor = next((arguments[name] for name in _TENSORS if isinstance(arguments.get(name), Tensor)), None)
    shape = () if tensor is None else tuple(tensor.shape)
    peer = next((arguments[k] for k in ("group_src", "group_dst", "src", "dst") if arguments.get(k) is not None), -1)
    if op not in ("send", "recv", "isend", "irecv"):
        return Inside(op, group_name(group), shape)
    with contextlib.suppress(Exception):  # whatever it is, the question is to be answered
        if arguments.get("group_src", arguments.get("group_dst")) is not None:
            peer = dist.get_global_rank(group, peer)
    return Inside(op.removeprefix("i"), group_name(group), shape, int(peer), int(arguments.get("tag") or 0))


def group_name(group: Any) -> str:
    """What a group is for, in a word."""
    return str(getattr(group, "group_desc", "") or "undefined").replace("default_pg", "world")


def _groups() -> tuple[GroupCount, ...]:
    """This process's groups and how many calls it issued in each, as far as the backend counts them."""
    found = []
    groups: list[Any] = list(distributed_c10d._world.pg_map)
    for group in groups:
        with contextlib.suppress(RuntimeError):
            ranks = tuple(dist.get_process_group_ranks(group))
            found.append(GroupCount(group_name(group), ranks, int(group._get_sequence_number_for_group())))
    return tuple(found)
