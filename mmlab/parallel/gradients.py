"""Gradients: packed into buckets, summed over data-parallel ranks while backward goes on, measured, clipped.

The loss is a sum over target tokens divided by the global count (design,
decision 7), so gradients are summed over ranks and never averaged.

A bucket starts as soon as the last backward of the step has filled it and all
buckets before it have started (Li et al. 2020, "PyTorch Distributed", section
3.2.3): the order is fixed, so all ranks of a group issue the same calls in the
same order whatever the timing, also when one had no image.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from mmlab.parallel.tensor import TensorGroup
from mmlab.parallel.traffic import Traffic
from mmlab.plan.schema import MODULES


@dataclass(frozen=True)
class Trained:
    """One trainable parameter as this rank holds it.

    `name` global name; `param` the module's parameter (maybe a DTensor); `value` its plain local tensor (same
    storage); `module` vision, projector or language; `counted` whether this rank counts it in gradient norms
    (replicas, over tp, dp or as a tied copy, count once); `partial_over_tp` whether each tensor rank has only a
    part of a replicated parameter's gradient (that of its tokens with sequence parallel; a LoRA factor's); `sharded`
    whether FSDP2 holds it: `value` is then this rank's rows, and their gradient is summed inside backward.
    """

    name: str
    param: torch.nn.Parameter
    value: Tensor
    module: str
    counted: bool
    partial_over_tp: bool = False
    sharded: bool = False


def local_tensor(tensor: Tensor) -> Tensor:
    """The plain local tensor that shares a parameter's storage, without autograd."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def split_over_tp(tensor: Tensor) -> bool:
    """Whether a parameter is split (not merely replicated) over its tensor group, which is a mesh's last axis."""
    if not isinstance(tensor, DTensor) or (tensor.device_mesh.mesh_dim_names or ("",))[-1] != "tp":
        return False
    return isinstance(tensor.placements[-1], Shard)


class BucketSum(Protocol):
    """How one bucket is summed over a group: the seam for compressors."""

    def start(self, flat: Tensor, group: dist.ProcessGroup) -> dist.Work:
        """Start summing `flat` [numel] in place; every rank of the group calls it for the same bucket."""


class DenseSum:
    """All-reduce of the values as they are."""

    def start(self, flat: Tensor, group: dist.ProcessGroup) -> dist.Work:
        """Start an all-reduce."""
        work = dist.all_reduce(flat, group=group, async_op=True)
        assert work is not None
        return work


@dataclass
class Bucket:
    """Gradients of some parameters of one module in one flat tensor, and how far they are in this step."""

    module: str
    members: list[Trained]
    flat: Tensor
    missing: set[str] = field(default_factory=set)
    work: dist.Work | None = None
    started: float = 0.0
    ended: float = 0.0

    @classmethod
    def of(cls, module: str, members: list[Trained]) -> Bucket:
        """A bucket that waits for all its members."""
        first = members[0].value
        flat = torch.zeros(sum(t.value.numel() for t in members), dtype=first.dtype, device=first.device)
        return cls(module, members, flat, {t.name for t in members})

    def views(self) -> Iterator[tuple[str, Tensor]]:
        """(name, view of its gradient in the shape of the parameter) of each member."""
        offset = 0
        for t in self.members:
            yield t.name, self.flat[offset : offset + t.value.numel()].view(t.value.shape)
            offset += t.value.numel()


def _split(trained: list[Trained], bucket_bytes: float) -> Iterable[list[Trained]]:
    """Members of each bucket: of one dtype, at most `bucket_bytes`; a larger parameter has a bucket of its own."""
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


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of (start, end) spans: buckets under way at the same time count once."""
    total, until = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


@dataclass(frozen=True)
class Overlap:
    """How long any of a module's gradients were under way in a step, and how long the rank waited for them; seconds."""

    seconds: float = 0.0
    exposed: float = 0.0


class Reducer:
    """All gradients of one rank: buckets of each module, summed over that module's group.

    Args:
        trained: what trains on this rank.
        groups: data-parallel group of each module, None where the rank is alone.
        bucket_bytes: upper bound of a bucket of each module.
        tp: the tensor group, for gradients that are partial over it.
        traffic: where the bytes of the data-parallel groups are counted.

    `grads[name]` is a view of a parameter's gradient, in the parameter's local shape.
    """

    def __init__(
        self,
        trained: list[Trained],
        groups: Mapping[str, dist.ProcessGroup | None],
        bucket_bytes: Mapping[str, float],
        tp: TensorGroup | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        self.trained, self.groups, self.tp, self.traffic = trained, groups, tp or TensorGroup(), traffic
        self.sums: dict[str, BucketSum] = {module: DenseSum() for module in MODULES}
        self.grads: dict[str, Tensor] = {}
        self.buckets: list[Bucket] = []
        self.partial: list[Bucket] = []
        self.overlap = {module: Overlap() for module in MODULES}
        self._armed: set[str] = set()
        self._next = 0
        self._where: dict[str, Bucket] = {}
        # Backward goes from the loss to the pixels, so the last parameters have their gradients first.
        for module in reversed(MODULES):
            mine = [t for t in reversed(trained) if t.module == module and not t.sharded]
            for members in _split([t for t in mine if not t.partial_over_tp], bucket_bytes[module]):
                self.buckets.append(Bucket.of(module, members))
            for members in _split([t for t in mine if t.partial_over_tp], bucket_bytes[module]):
                self.partial.append(Bucket.of(module, members))
        for bucket in (*self.buckets, *self.partial):
            self.grads.update(bucket.views())
            for t in bucket.members:
                self._where[t.name] = bucket
                t.param.register_post_accumulate_grad_hook(lambda _, t=t: self._accumulated(t))

    def arm(self, names: Iterable[str]) -> None:
        """The backward that follows is the step's last one for these parameters: what it accumulates is complete."""
        self._armed.update(names)

    def complete(self, t: Trained) -> None:
        """Take the gradient of a parameter, now complete, and start what can start."""
        bucket = self._where[t.name]
        if t.name not in bucket.missing:
            return
        self._fill(t)
        bucket.missing.discard(t.name)
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self._start(self.buckets[self._next])
            self._next += 1

    def _accumulated(self, t: Trained) -> None:
        if t.name in self._armed:
            self.complete(t)

    def _fill(self, t: Trained) -> None:
        """Move what backward left in `.grad` into the bucket; no gradient means zero (no image, no target)."""
        grad = t.param.grad
        if grad is None:
            self.grads[t.name].zero_()
        else:
            self.grads[t.name].copy_(local_tensor(grad))
            t.param.grad = None

    def _fill_missing(self, bucket: Bucket) -> None:
        for t in bucket.members:
            if t.name in bucket.missing:
                self._fill(t)

    def _start(self, bucket: Bucket) -> None:
        group = self.groups.get(bucket.module)
        if group is None:
            return
        if self.traffic is not None:
            self.traffic.add(bucket.module, bucket.flat)
        bucket.started = time.perf_counter()
        bucket.ended = 0.0
        bucket.work = self.sums[bucket.module].start(bucket.flat, group)
        if bucket.flat.device.type == "cpu":

            def ended(_: object) -> None:
                bucket.ended = time.perf_counter()

            bucket.work.get_future().add_done_callback(ended)

    def finish(self) -> None:
        """Start what is left, in order, and wait for everything: gradients are then those of the global batch."""
        for bucket in self.buckets[self._next :]:
            self._fill_missing(bucket)
            self._start(bucket)
        for bucket in self.partial:
            self._fill_missing(bucket)
            if self.tp.size > 1:
                self.tp.all_reduce(bucket.flat)
            self._start(bucket)
        self._wait()
        self._take_sharded()

    def _take_sharded(self) -> None:
        """Gradients that FSDP2 has summed over the data-parallel ranks."""
        for t in self.trained:
            if t.sharded:
                grad = t.param.grad
                self.grads[t.name] = torch.zeros_like(t.value) if grad is None else local_tensor(grad)
                t.param.grad = None
        partial = [self.grads[t.name] for t in self.trained if t.sharded and t.partial_over_tp]
        if partial and self.tp.size > 1:
            flat = torch.cat([grad.flatten() for grad in partial])
            self.tp.all_reduce(flat)
            torch._foreach_copy_(
                partial,
                [g.view(p.shape) for p, g in zip(partial, flat.split([p.numel() for p in partial]), strict=True)],
            )

    def _wait(self) -> None:
        exposed = dict.fromkeys(MODULES, 0.0)
        under_way: dict[str, list[tuple[float, float]]] = {module: [] for module in MODULES}
        for bucket in (*self.buckets, *self.partial):
            bucket.missing = {t.name for t in bucket.members}
            if bucket.work is None:
                continue
            began = time.perf_counter()
            bucket.work.wait()
            now = time.perf_counter()
            exposed[bucket.module] += now - began
            under_way[bucket.module].append((bucket.started, bucket.ended or now))
            bucket.work = None
        self.overlap = {module: Overlap(covered(under_way[module]), exposed[module]) for module in MODULES}
        self._armed.clear()
        self._next = 0

    def release(self) -> None:
        """Forget the gradients that are made anew in each step (the sharded ones)."""
        for t in self.trained:
            if t.sharded:
                self.grads.pop(t.name, None)

    def squared_norms(self, modules: tuple[str, ...]) -> Tensor:
        """This rank's share of the squared gradient norm of each module, float64 [len(modules)]."""
        return squared_norms(modules, ((t.module, self.grads[t.name]) for t in self.trained if t.counted))

    def scale(self, factor: float) -> None:
        """Multiply all gradients (clipping)."""
        flats = [bucket.flat for bucket in (*self.buckets, *self.partial)]
        flats += [self.grads[t.name] for t in self.trained if t.sharded]
        if factor != 1.0 and flats:
            torch._foreach_mul_(flats, factor)


def squared_norms(modules: tuple[str, ...], grads: Iterable[tuple[str, Tensor]]) -> Tensor:
    """Squared norm of each module's gradients, from (module, gradient or part of one); float64 [len(modules)]."""
    found, sums = list(grads), torch.zeros(len(modules), dtype=torch.float64)
    for index, module in enumerate(modules):
        mine = [grad for of, grad in found if of == module]
        if mine:
            norms = torch._foreach_norm(mine, 2, dtype=torch.float64)
            sums[index] = torch.stack(norms).square().sum().cpu()
    return sums


def reduce_tied(grad: Tensor, group: dist.ProcessGroup) -> None:
    """Sum the gradient of the tied embedding over the first and the last stage (Megatron-LM's embedding group)."""
    dist.all_reduce(grad, group=group)
