"""How ranks agree about a save in the background: through the rendezvous store, never through a process group.

A thread that writes must not share collectives with the step (their order would differ from rank to rank), and groups
of its own would have to be cut and made anew like all others. The store needs neither: values under keys of one save,
looked for until they are there or the save is given up.
"""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from mmlab.errors import CheckpointError

LOOK = 0.01, 0.1
"""Seconds between looks for a value: at first, and after a second."""


class GivenUp(Exception):
    """The save was given up: its generation of the run has ended."""


class Exchange:
    """Rounds between the ranks of one save. All ranks go through the same ones.

    Args:
        store: where values are left; None for a plan of one rank.
        save: what tells this save from all others.
        stop: set when the save is to be given up.
    """

    def __init__(self, store: dist.Store | None, save: str, rank: int, world: int, stop: threading.Event) -> None:
        self.store, self.rank, self.world, self.stop = store, rank, world, stop
        self._save, self._round = save, 0

    def round(self, mine: Callable[[], Any], combine: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Every rank does `mine`; rank 0 makes a reply for each rank of the results, in rank order; returns the reply.

        CheckpointError on every rank with the reason of the first that could not; none goes on before all have
        ended their part. GivenUp when the save is.
        """
        self._round += 1
        answer = self._tried(mine)
        if self.rank != 0:
            self._put(f"{self.rank}", answer)
            ok, reply = self._get(f"for {self.rank}")
        else:
            answers = [answer, *(self._get(f"{rank}") for rank in range(1, self.world))]
            failed = next(((False, reason) for good, reason in answers if not good), None)
            ok, replies = failed or self._tried(lambda: list(combine([value for _, value in answers])))
            for rank in range(1, self.world):
                self._put(f"for {rank}", (ok, replies[rank] if ok else replies))
            reply = replies[0] if ok else replies
        if not ok:
            raise CheckpointError(reply)
        return reply

    def _tried(self, work: Callable[[], Any]) -> tuple[bool, Any]:
        if self.stop.is_set():
            raise GivenUp
        try:
            return True, work()
        except (GivenUp, dist.DistError):
            raise
        except Exception as error:
            lines = str(error).splitlines() or [type(error).__name__]
            said = lines[0] if isinstance(error, OSError | CheckpointError) else f"{type(error).__name__}: {lines[0]}"
            return False, f"rank {self.rank}: {said}" if self.world > 1 else said

    def _put(self, key: str, value: Any) -> None:
        assert self.store is not None
        self.store.set(f"{self._save}/{self._round}/{key}", pickle.dumps(value))  # type: ignore[arg-type]  # takes bytes

    def _get(self, key: str) -> Any:
        assert self.store is not None
        name = f"{self._save}/{self._round}/{key}"
        began = time.monotonic()
        while not self.store.check([name]):
            if self.stop.wait(LOOK[time.monotonic() - began > 1.0]):
                raise GivenUp
        value = pickle.loads(self.store.get(name))
        self.store.delete_key(name)
        return value
