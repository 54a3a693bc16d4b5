"""The collectives that a reduction is made of: started, and their bytes counted where they are handed over."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from mmlab.parallel.shm import GlooFallback, ShmGroup
from mmlab.parallel.traffic import Traffic


class Wire:
    """One group, and the traffic axis under which its bytes are counted (not at all without `traffic`).

    Over gloo, what is not summed goes by sends and receives, every receive posted before any send. A receive tells the
    other side that it may send, and that message queues behind the data that this side sends: gloo's own all-to-all and
    all-gather send first, so one direction waits for the other, and take 1.9 times as long as the link needs for the
    bits; these 1.1 times (two ranks, 100 Mbit/s each way, 1 to 16 MB).
    """

    def __init__(self, group: dist.ProcessGroup, axis: str = "", traffic: Traffic | None = None) -> None:
        self.group, self.axis, self.traffic = group, axis, traffic
        self.ranks, self.rank = group.size(), group.rank()
        self._gloo = dist.get_backend(group) == "gloo" or isinstance(group, GlooFallback)

    @property
    def uncounted(self) -> Wire:
        """The same group without a count, for what is not training (measuring)."""
        return Wire(self.group)

    @property
    def ordered(self) -> bool:
        """Whether an all-reduce adds in the order of the ranks. gloo's ring begins elsewhere in each chunk, which two
        ranks do not notice: a + b is b + a."""
        return self.ranks < 3 or isinstance(self.group, ShmGroup)

    def _count(self, tensor: Tensor) -> None:
        if self.traffic is not None:
            self.traffic.add(self.axis, tensor)

    def all_reduce(self, tensor: Tensor) -> dist.Work:
        """Start summing in place."""
        self._count(tensor)
        return _started(dist.all_reduce(tensor, group=self.group, async_op=True))

    def reduce_scatter(self, out: Tensor, data: Tensor) -> dist.Work:
        """Start summing `data` [ranks x n]; `out` [n] becomes this rank's share."""
        self._count(data)
        return _started(dist.reduce_scatter_tensor(out, data, group=self.group, async_op=True))

    def all_to_all(self, out: Tensor, out_sizes: list[int], data: Tensor, sizes: list[int]) -> dist.Work:
        """Start sending `sizes[rank]` elements of `data` to each rank, receiving `out_sizes[rank]` into `out`."""
        self._count(data)
        if self._gloo:
            return self._swap(out.split(out_sizes), data.split(sizes))
        return _started(dist.all_to_all_single(out, data, out_sizes, sizes, group=self.group, async_op=True))

    def all_gather(self, out: Tensor, data: Tensor) -> dist.Work:
        """Start gathering every rank's `data` [n] into `out` [ranks x n]."""
        self._count(data)
        if self._gloo:
            return self._swap(out.split(data.numel()), [data] * self.ranks)
        return _started(dist.all_gather_into_tensor(out, data, group=self.group, async_op=True))

    def _swap(self, into: Sequence[Tensor], given: Sequence[Tensor]) -> dist.Work:
        """Start sending `given[rank]` to each rank and receiving `into[rank]` from it. Messages of a pair of ranks keep
        their order, which is that of the calls, the same on all ranks; empty ones are neither sent nor received."""
        others = [(self.rank + i) % self.ranks for i in range(1, self.ranks)]
        into[self.rank].copy_(given[self.rank])
        works = [dist.irecv(into[r], group=self.group, group_src=r) for r in others if into[r].numel()]
        works += [dist.isend(given[r], group=self.group, group_dst=r) for r in others if given[r].numel()]
        return _Transfers([_started(work) for work in works])


class _Transfers(dist._Work):
    """Sends and receives that are waited for together."""

    def __init__(self, works: list[dist.Work]) -> None:
        super().__init__()
        self._works = works
        self._future: torch.futures.Future[None] = torch.futures.Future()

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for all of them; a timeout of 0 is that of the group."""
        while self._works:
            self._works.pop().wait(timeout)
        if not self._future.done():
            self._future.set_result(None)
        return True

    def is_completed(self) -> bool:
        """Whether they have been waited for."""
        return self._future.done()

    def get_future(self) -> torch.futures.Future[None]:
        """Done when they have been waited for: gloo says of no single transfer when it ends."""
        return self._future


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None  # this rank is a member of its own group
    return work
