"""The collectives that a reduction is made of: started, and their bytes counted where they are handed over."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from mmlab.parallel.shm import ShmGroup
from mmlab.parallel.traffic import Traffic


class Wire:
    """One group, and the traffic axis under which its bytes are counted (not at all without `traffic`)."""

    def __init__(self, group: dist.ProcessGroup, axis: str = "", traffic: Traffic | None = None) -> None:
        self.group, self.axis, self.traffic = group, axis, traffic
        self.ranks, self.rank = group.size(), group.rank()

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

    def all_to_all(self, out: Tensor, out_sizes: list[int], data: Tensor, sizes: list[int]) -> dist.Work:
        """Start sending `sizes[rank]` elements of `data` to each rank, receiving `out_sizes[rank]` into `out`."""
        self._count(data)
        return _started(dist.all_to_all_single(out, data, out_sizes, sizes, group=self.group, async_op=True))

    def all_gather(self, out: Tensor, data: Tensor) -> dist.Work:
        """Start gathering every rank's `data` [n] into `out` [ranks x n]."""
        self._count(data)
        return _started(dist.all_gather_into_tensor(out, data, group=self.group, async_op=True))


def _started(work: dist.Work | None) -> dist.Work:
    assert work is not None  # this rank is a member of its own group
    return work
