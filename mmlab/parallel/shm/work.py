"""One call of a group, as the caller holds it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from mmlab.parallel.shm.progress import Progress

Steps = Generator[tuple[int, int], None, None]
"""A collective: yields (rank, flag) to wait until that rank's flag, or every rank's if rank is -1, reaches a value."""


class PeerLost(dist.DistBackendError):
    """A shared-memory call cannot finish: a peer ended, left, did not come in time, or the group was aborted."""


class ShmWork(dist._Work):
    """One call under way. `wait` drives it to its end; raises what went wrong."""

    done = False
    error: BaseException | None = None
    needs: tuple[int, int] | None = None  # what the generator waits for
    steps: Steps | None = None
    call: tuple[str, int, int] | None = None  # of a collective: op, bytes, number
    shape: tuple[int, ...] = ()  # of the (first) tensor
    note: tuple[str, int, int, int] | None = None  # of a send or receive: op, peer, tag, bytes
    noted = False  # whether the record of calls says that this rank waits in it
    source = -1
    _future: torch.futures.Future | None = None

    def __init__(self, progress: Progress, result: list[Tensor], finish: Callable[[], None] | None = None) -> None:
        super().__init__()
        self.progress, self.tensors, self.finish = progress, result, finish
        self.deadline = 0.0

    @property
    def label(self) -> str:
        """The call in words, for messages."""
        if self.call is not None:
            return f"{self.call[0]} #{self.call[2]}"
        if self.note is not None:
            return f"{self.note[0]} ({'to' if self.note[0] == 'send' else 'from'} {self.note[1]}, tag {self.note[2]})"
        return "a call"

    def complete(self, error: BaseException | None = None) -> None:
        """Mark as done (by whoever drove it)."""
        self.steps = None
        if error is None and self.finish is not None:
            try:
                self.finish()
            except Exception as failed:
                error = failed
        self.finish = None
        self.error = error
        self.done = True
        if self._future is not None:
            self._resolve(self._future)

    def _resolve(self, future: torch.futures.Future) -> None:
        if self.error is None:
            future.set_result(self.tensors)
        else:
            future.set_exception(self.error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the call is complete; PeerLost when it cannot be."""
        if not self.done:
            self.progress.drive(self, timeout)
        if self.error is not None:
            raise self.error
        return True

    def synchronize(self) -> None:
        """The same as `wait`."""
        self.wait()

    def is_completed(self) -> bool:
        """Whether the call is complete; drives it as far as it goes without waiting."""
        if not self.done:
            self.progress.poll()
        return self.done

    def is_success(self) -> bool:
        """Whether the call is complete and nothing went wrong."""
        return self.done and self.error is None

    def exception(self) -> Any:
        """What went wrong, None if nothing did."""
        return self.error

    def _source_rank(self) -> int:
        """The rank of the group that a received message came from."""
        return self.source

    source_rank = _source_rank

    def result(self) -> list[Tensor]:
        """The tensors that the call fills."""
        return self.tensors

    def get_future(self) -> torch.futures.Future:
        """A future of `result()`."""
        with self.progress.lock:
            if self._future is None:
                self._future = torch.futures.Future()
                if self.done:
                    self._resolve(self._future)
                else:
                    self.progress.hand_over()
        return self._future
