"""Point-to-point transfers: image tokens to the language model, activations between stages, gradients back.

Sends never block, receives do. Every message carries a tag made of its kind
and its microbatch, so messages between one pair of ranks cannot be confused
however the two op lists interleave. Shapes are known to both sides from the
step manifest; none is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from mmlab.parallel.traffic import Traffic

KINDS = ("tokens", "token_grads", "forward", "backward", "next_ids")
AXIS = {"tokens": "tokens", "token_grads": "tokens", "forward": "pp", "backward": "pp", "next_ids": "pp"}
"""Axis (of `mmlab.messages.AXES`) that each kind is counted under."""
_TAGS_PER_KIND = 1 << 20


class Link:
    """Sends and receives of one direction, on a process group of its own.

    Forward and backward traffic use two groups: NCCL runs the transfers of one pair in the order in which they were
    issued, and 1F1B issues a stage's sends forward and receives backward in another order than its neighbour does.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, traffic: Traffic) -> None:
        self.group = group
        self.device = device
        self.traffic = traffic
        self._pending: list[tuple[dist.Work | None, Tensor]] = []

    @staticmethod
    def _tag(kind: str, microbatch: int) -> int:
        return KINDS.index(kind) * _TAGS_PER_KIND + microbatch

    def send(self, tensor: Tensor, peer: int, kind: str, microbatch: int) -> None:
        """Start sending; the tensor is kept until `flush`. Empty tensors are not sent (nor received)."""
        if tensor.numel() == 0:
            return
        tensor = tensor.detach().contiguous()
        self.traffic.add(AXIS[kind], tensor)
        work = dist.isend(tensor, peer, group=self.group, tag=self._tag(kind, microbatch))
        self._pending.append((work, tensor))

    def recv(self, shape: Sequence[int], dtype: torch.dtype, peer: int, kind: str, microbatch: int) -> Tensor:
        """Receive a tensor of a shape that both sides know."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        if tensor.numel():
            dist.recv(tensor, peer, group=self.group, tag=self._tag(kind, microbatch))
        return tensor

    def flush(self) -> None:
        """Wait until everything sent has left."""
        for work, _ in self._pending:
            if work is not None:
                work.wait()
        self._pending.clear()

    def drop(self) -> None:
        """Forget what is under way (after a failure)."""
        self._pending.clear()
