"""How packed gradients are summed over a group: as they are, or compressed as the plan says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Protocol

import torch.distributed as dist

from mmlab.parallel.compression.codecs import Bf16, Codec, Fp16, Int8, OneBit, TopK
from mmlab.parallel.compression.exchange import reduce_coded
from mmlab.parallel.compression.feedback import Packed
from mmlab.parallel.compression.powersgd import PowerSgd
from mmlab.parallel.compression.wire import Wire
from mmlab.plan.schema import GroupCommunication


class BucketSum(Protocol):
    """How packed gradients are summed over a group; `residual` is the plan's word for residuals it does not keep."""

    residual: str

    def rounds(self, packed: Packed, wire: Wire, unit: float) -> Iterator[dist.Work]:
        """Sum `packed.flat` [numel] over the group of `wire`, in place.

        Every rank of the group calls it for the same gradients, in the same order. Yields what is to be waited for
        before the next call of next(). `unit`: what the gradients are multiplied by (the loss scale).
        """


class DenseSum:
    """All-reduce of the values as they are; `residual` is what becomes of an earlier compressor's (see the plan)."""

    def __init__(self, residual: str = "flush") -> None:
        self.residual = residual

    def rounds(self, packed: Packed, wire: Wire, unit: float) -> Iterator[dist.Work]:
        """One all-reduce."""
        packed.kept.leave(packed.flat, unit, self.residual)
        yield wire.all_reduce(packed.flat)


class CodedSum:
    """A sum of coded gradients, with error feedback where `feedback` says so."""

    def __init__(self, codec: Codec, feedback: bool, residual: str = "flush") -> None:
        self.codec, self.feedback, self.residual = codec, feedback, residual

    def rounds(self, packed: Packed, wire: Wire, unit: float) -> Iterator[dist.Work]:
        """Two rounds: every rank sums a chunk, then all have all sums."""
        lost = packed.kept.take(packed.flat, unit, self.feedback, self.residual)
        yield from reduce_coded(packed.flat, lost, self.codec, wire, unit)


CODECS: Mapping[str, Callable[[GroupCommunication], Codec]] = MappingProxyType(
    {
        "bf16": lambda _: Bf16(),
        "fp16": lambda _: Fp16(),
        "int8": lambda _: Int8(),
        "topk": lambda settings: TopK(settings.ratio),
        "onebit": lambda _: OneBit(),
    }
)
"""Codecs by the plan's names."""


def make_codec(settings: GroupCommunication) -> Codec:
    """The codec that a plan's settings name. KeyError for a compressor that is not a codec."""
    return CODECS[settings.compressor](settings)


def make_sum(settings: GroupCommunication) -> BucketSum:
    """What sums the gradients of a group as the plan says."""
    if settings.compressor == "none":
        return DenseSum(settings.residual)
    if settings.compressor == "powersgd":
        return PowerSgd(settings)
    return CodedSum(make_codec(settings), settings.keeps_residual, settings.residual)
