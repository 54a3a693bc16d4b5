"""Gradients after backward: packed into buckets, summed over data-parallel ranks, measured, clipped.

The loss is a sum over target tokens divided by the global count (design,
decision 7), so gradients are summed over ranks and never averaged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


@dataclass(frozen=True)
class Trained:
    """One trainable parameter as this rank holds it.

    `name` global name; `param` the module's parameter (maybe a DTensor); `value` its plain local tensor (same
    storage); `module` vision, projector or language; `counted` whether this rank counts it in gradient norms
    (replicas, over tp, dp or as a tied copy, count once); `partial_over_tp` whether the gradient of a replicated
    parameter is still to be summed over the tensor group, because each rank computes a share of it.
    """

    name: str
    param: torch.nn.Parameter
    value: Tensor
    module: str
    counted: bool
    partial_over_tp: bool = False


def local_tensor(tensor: Tensor) -> Tensor:
    """The plain local tensor that shares a parameter's storage, without autograd."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def is_sharded(tensor: Tensor) -> bool:
    """Whether a parameter is split (not merely replicated) over its tensor group."""
    return isinstance(tensor, DTensor) and any(isinstance(p, Shard) for p in tensor.placements)


class GradientBuckets:
    """Flat buckets of one dtype that hold the gradients of some parameters, in a fixed order.

    `group` is the data-parallel group, None for a single rank. `bucket_bytes` bounds a bucket; a larger parameter has
    one of its own. `grads[name]` is a view into a bucket.
    """

    def __init__(self, trained: list[Trained], group: dist.ProcessGroup | None, bucket_bytes: float) -> None:
        self.trained = trained
        self.group = group
        self.buckets: list[Tensor] = []
        self.grads: dict[str, Tensor] = {}
        for members in self._split(trained, bucket_bytes):
            first = members[0].value
            flat = torch.zeros(sum(t.value.numel() for t in members), dtype=first.dtype, device=first.device)
            offset = 0
            for t in members:
                self.grads[t.name] = flat[offset : offset + t.value.numel()].view(t.value.shape)
                offset += t.value.numel()
            self.buckets.append(flat)

    @staticmethod
    def _split(trained: list[Trained], bucket_bytes: float) -> Iterable[list[Trained]]:
        members: list[Trained] = []
        size = 0
        for t in trained:
            bytes_ = t.value.numel() * t.value.element_size()
            if members and (size + bytes_ > bucket_bytes or members[0].value.dtype != t.value.dtype):
                yield members
                members, size = [], 0
            members.append(t)
            size += bytes_
        if members:
            yield members

    def collect(self) -> None:
        """Move what backward left in `.grad` into the buckets; no gradient means zero (no image, no target)."""
        for t in self.trained:
            grad = t.param.grad
            if grad is None:
                self.grads[t.name].zero_()
            else:
                self.grads[t.name].copy_(local_tensor(grad))
                t.param.grad = None

    def reduce(self) -> None:
        """Sum the buckets over the data-parallel group; every rank makes the same calls in the same order."""
        if self.group is None:
            return
        works = [dist.all_reduce(bucket, group=self.group, async_op=True) for bucket in self.buckets]
        for work in works:
            work.wait()

    def squared_norms(self, modules: tuple[str, ...]) -> Tensor:
        """This rank's share of the squared gradient norm of each module, float64 [len(modules)]."""
        sums = torch.zeros(len(modules), dtype=torch.float64)
        for index, module in enumerate(modules):
            grads = [self.grads[t.name] for t in self.trained if t.module == module and t.counted]
            if grads:
                norms = torch._foreach_norm(grads, 2, dtype=torch.float64)
                sums[index] = torch.stack(norms).square().sum().cpu()
        return sums

    def scale(self, factor: float) -> None:
        """Multiply all gradients (clipping)."""
        if factor != 1.0 and self.buckets:
            torch._foreach_mul_(self.buckets, factor)


def reduce_partial(grads: list[Tensor], group: dist.ProcessGroup) -> None:
    """Sum gradients of which each tensor-parallel rank has a share over the tensor group, in one call."""
    if grads:
        flat = torch.cat([grad.flatten() for grad in grads])
        dist.all_reduce(flat, group=group)
        torch._foreach_copy_([grad.view(-1) for grad in grads], list(flat.split([grad.numel() for grad in grads])))


def reduce_tied(grad: Tensor, group: dist.ProcessGroup) -> None:
    """Sum the gradient of the tied embedding over the first and the last stage (Megatron-LM's embedding group)."""
    dist.all_reduce(grad, group=group)
