"""The ops of a step: what one rank can be told to do. Executed, costed and drawn from the same list."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

Kind = Literal[
    "encode", "encode_ahead", "send_tokens", "recv_token_grads", "encode_backward",
    "recv_tokens", "recv_forward", "forward", "send_forward",
    "recv_backward", "backward", "backward_input", "send_backward", "send_token_grads", "backward_weight",
    "reduce", "reduce_embedding", "norm", "update",
]  # fmt: skip

PASSES = frozenset({"forward", "backward", "backward_input", "backward_weight"})
"""Passes of a microbatch through a stage."""
COMPUTE = PASSES | {"encode", "encode_ahead", "encode_backward"}
"""Kinds that compute; the others move or reduce data, except `update`."""


@dataclass(frozen=True)
class Op:
    """One op of a rank.

    `microbatch` is its index, -1 for ops of the whole step. `peer` is the rank at the other end of a transfer between
    stages, -1 otherwise: token ops have several peers (all encoder ranks; the first stage of every replica), and which
    images an encoder rank owns is said by the step manifest. Encoder ops of microbatch m stand for microbatch m of
    every replica. `chunk` is the rank's own index of the model chunk (0 where a rank holds one piece of the decoder).
    Which ranks give gradients of image tokens back is said by `encoder_ops.returns_token_grads`.

    `encode` and `encode_backward` stand for the microbatches that are encoded together (`parallel.encoder_batch`), by
    the first of them. With `parallel.encoder_ahead` `encode` takes features from a queue, and `encode_ahead` has those
    of later steps computed in the background.

    `chunk` says which of the rank's model chunks the op belongs to (0 where it has one): that which computes, whose
    output is sent or for whose input is received. A zero-bubble schedule has `backward_input` and `backward_weight` in
    the place of `backward`. Between two chunks of one rank nothing is sent.

    `reduce` collects the rank's gradients and sums them over its data-parallel group (which may be the rank alone),
    `reduce_embedding` sums those of a table that first and last stage share, `norm` is the one reduction over all
    ranks (norms, loss, flags), `update` is the optimizer and the learning-rate schedule.
    """

    kind: Kind
    microbatch: int = -1
    peer: int = -1
    chunk: int = 0


class Timed(NamedTuple):
    """An op with its start and end, both from the start of the step and in one unit."""

    op: Op
    start: float
    end: float


Timeline = list[list[Timed]]
"""One list of timed ops for each rank, in the order of execution."""
