"""Point-to-point transfers: image tokens to the language model, activations between stages, gradients back.

Sends never block, receives do. Every message carries a tag made of its kind,
its microbatch and its place in the pipeline, so messages between one pair of
ranks cannot be confused however the two op lists interleave. Shapes are known
to both sides from the step manifest; none is sent.
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


class Link:
    """Sends and receives of one direction of the computation, on process groups of its own.

    Forward and backward traffic use different groups: NCCL runs the transfers of one pair in the order in which they
    were issued, and 1F1B issues a stage's sends forward and receives backward in another order than its neighbour does.
    Model chunks send both ways between two ranks in one direction of the computation, and one of them would have to
    receive before it sends: then `down` carries what goes from a higher rank to a lower one. What a rank sends to
    itself (where it encodes and holds the first stage) stays where it is; `group` is None for a rank that is alone.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        rank: int,
        device: torch.device,
        traffic: Traffic,
        down: dist.ProcessGroup | None = None,
    ) -> None:
        self.up, self.down = group, down or group
        self.rank = rank
        self.device = device
        self.traffic = traffic
        self._pending: list[tuple[dist.Work | None, Tensor]] = []
        self._own: dict[int, Tensor] = {}

    @staticmethod
    def _tag(kind: str, microbatch: int, stage: int) -> int:
        """A number of its own for each message of a step: microbatches below 2^16, stages below 2^10."""
        return (KINDS.index(kind) << 26) + (stage << 16) + microbatch

    def send(self, tensor: Tensor, peer: int, kind: str, microbatch: int, stage: int = 0) -> None:
        """Start sending; the tensor is kept until `flush`. Empty tensors are not sent (nor received).

        `stage` is, between two stages, the lower of them.
        """
        if tensor.numel() == 0:
            return
        tensor = tensor.detach().contiguous()
        if peer == self.rank:
            self._own[self._tag(kind, microbatch, stage)] = tensor
            return
        self.traffic.add(AXIS[kind], tensor)
        group = self.up if peer > self.rank else self.down
        work = dist.isend(tensor, peer, group=group, tag=self._tag(kind, microbatch, stage))
        self._pending.append((work, tensor))

    def recv(
        self, shape: Sequence[int], dtype: torch.dtype, peer: int, kind: str, microbatch: int, stage: int = 0
    ) -> Tensor:
        """Receive a tensor of a shape that both sides know. From itself, a rank gets what it sent, uncopied."""
        if peer == self.rank and 0 not in shape:
            return self._own.pop(self._tag(kind, microbatch, stage))
        tensor = torch.empty(tuple(shape), dtype=dtype, device=self.device)
        if tensor.numel():
            group = self.up if peer < self.rank else self.down
            dist.recv(tensor, peer, group=group, tag=self._tag(kind, microbatch, stage))
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
        self._own.clear()
