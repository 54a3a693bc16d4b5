"""Trainable parameters as a rank holds them, and the buckets that their gradients are packed into."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from mmlab.parallel.compression.feedback import Kept, Packed


@dataclass(frozen=True)
class Trained:
    """One trainable parameter as this rank holds it.

    `name` global name; `param` the module's parameter (maybe a DTensor); `value` its plain local tensor (same
    storage); `module` vision, projector or language; `counted` whether this rank counts it in gradient norms
    (replicas, over tp, dp or as a tied copy, count once); `partial_over_tp` whether each tensor rank has only a
    part of a replicated parameter's gradient (that of its tokens with sequence parallel; a LoRA factor's); `sharded`
    whether FSDP2 holds it: `value` is then this rank's rows, and their gradient is summed inside backward; `once`
    whether this rank counts it in sums over all ranks of what differs between replicas (replicas over tp are equal).
    """

    name: str
    param: torch.nn.Parameter
    value: Tensor
    module: str
    counted: bool
    partial_over_tp: bool = False
    sharded: bool = False
    once: bool = True


def local_tensor(tensor: Tensor) -> Tensor:
    """The plain local tensor that shares a parameter's storage, without autograd."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def split_over_tp(tensor: Tensor) -> bool:
    """Whether a parameter is split (not merely replicated) over its tensor group, which is a mesh's last axis."""
    if not isinstance(tensor, DTensor) or (tensor.device_mesh.mesh_dim_names or ("",))[-1] != "tp":
        return False
    return isinstance(tensor.placements[-1], Shard)


@dataclass
class Bucket(Packed):
    """Packed gradients of one module, and how far they are in this step."""

    module: str = ""
    members: list[Trained] = field(default_factory=list)
    missing: set[str] = field(default_factory=set)
    """Members whose gradients are not there yet."""
    rounds: Iterator[dist.Work] | None = None
    """What is left of the reduction that is under way."""
    work: dist.Work | None = None
    """What is to be waited for before the next round."""
    dense: Tensor | None = None
    """What is to be summed without compression besides, in a step that measures."""
    started: float = 0.0
    ended: float = 0.0

    @property
    def bytes(self) -> int:
        """Memory of the gradients."""
        return self.flat.numel() * self.flat.element_size()

    def residual(self) -> Tensor:
        """A residual of zeros, flat."""
        return torch.zeros_like(self.flat)

    def parts(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(name, values in the parameter's shape) of each member, from a flat tensor like that of the gradients."""
        return self.views(flat)

    def put(self, flat: Tensor, name: str, value: Tensor) -> None:
        """Write a member's values into such a tensor."""
        dict(self.views(flat))[name].copy_(value)

    @classmethod
    def of(cls, module: str, members: list[Trained], undoable: bool = False) -> Bucket:
        """A bucket that waits for all its members."""
        first = members[0].value
        flat = torch.zeros(sum(t.value.numel() for t in members), dtype=first.dtype, device=first.device)
        shapes = {t.name: t.value.shape for t in members}
        return cls(flat, shapes, Kept(undoable=undoable), module, members, set(shapes))


def split(trained: list[Trained], bucket_bytes: float) -> Iterable[list[Trained]]:
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
