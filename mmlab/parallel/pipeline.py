"""Runs an op list: the same list that `mmlab.plan.schedule` costs and draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from mmlab.parallel.watch import Watch
from mmlab.plan.schedule import Op

Handler = Callable[[Op], None]

PHASE_OF = {
    "encode": "encode",
    "encode_backward": "encode",
    "encode_ahead": "encode",
    "send_tokens": "exchange",
    "recv_tokens": "exchange",
    "send_token_grads": "exchange",
    "recv_token_grads": "exchange",
    "recv_forward": "pipeline",
    "send_forward": "pipeline",
    "recv_backward": "pipeline",
    "send_backward": "pipeline",
    "forward": "forward",
    "backward": "backward",
    "backward_input": "backward",
    "backward_weight": "backward",
    "reduce": "reduce",
    "reduce_embedding": "reduce",
    "norm": "reduce",
    "update": "optimizer",
}
"""Phase (of `mmlab.messages.PHASES`) that each kind of op is counted under."""

FORWARD_KINDS = frozenset({"encode", "send_tokens", "recv_tokens", "recv_forward", "forward", "send_forward"})
"""Ops of a forward pass alone (evaluation)."""


def run_ops(ops: Sequence[Op], handlers: Mapping[str, Handler], watch: Watch) -> None:
    """Run ops in order; each handler gets its op. KeyError when a kind has no handler."""
    for op in ops:
        with watch.timed(PHASE_OF[op.kind], op):
            handlers[op.kind](op)


def forward_ops(ops: Sequence[Op], microbatches: int) -> list[Op]:
    """The forward half of an op list, cut to the first `microbatches`; order kept, so it cannot deadlock either."""
    return [op for op in ops if op.kind in FORWARD_KINDS and op.microbatch < microbatches]
