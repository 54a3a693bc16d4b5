"""The weight half of backward, put off: what a zero-bubble schedule fills its bubbles with (Qi et al. 2023, section 2).

A linear layer's backward makes two products: the gradient of its input, which the stage before waits for, and that of
its weight, which nobody waits for before the step's reduction. Here the first is computed as usual and the second
becomes a pair (input, output gradient) in a queue. The queue holds what autograd would have held for the layer, so
with activation checkpointing every block is computed again once, in the input half. (torch's own split of backward,
`torch.distributed.pipelining`, walks the graph twice and computes it again up to three times.)

Biases, norms and embedding lookups are cheap: their gradients are made in the input half.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mmlab.parallel.buckets import local_tensor
from mmlab.parallel.tensor import local

Key = tuple[int, int]
"""(microbatch, model chunk) of a backward."""


class WeightQueue:
    """Pairs of input and output gradient of linear layers whose weight gradients are still to be computed."""

    def __init__(self) -> None:
        self._key: Key | None = None
        self._pairs: dict[Key, list[tuple[Tensor, Tensor, Tensor]]] = {}

    @property
    def open(self) -> bool:
        """Whether backward runs inside `collect`; outside, weight gradients are computed at once."""
        return self._key is not None

    @contextmanager
    def collect(self, key: Key) -> Iterator[None]:
        """Put off the weight gradients of the backward that runs inside, under `key`."""
        self._key = key
        self._pairs.setdefault(key, [])
        try:
            yield
        finally:
            self._key = None

    def put(self, weight: Tensor, x: Tensor, grad: Tensor) -> None:
        """Add a pair: x [..., I] went into `weight` [O, I], `grad` [..., O] came back."""
        assert self._key is not None
        self._pairs[self._key].append((weight, x.detach(), grad))  # detached: the graph behind x is not to live on

    @torch.no_grad()
    def run(self, key: Key, done: Callable[[Tensor], None] | None = None) -> None:
        """Compute the weight gradients that were put off under `key` and add them to the weights' `.grad`.

        `done` is told of each weight once all its pairs of that key are in. KeyError where no backward ran under the
        key, or its weight half has run already.
        """
        pairs = self._pairs.pop(key)
        last = {id(weight): index for index, (weight, _, _) in enumerate(pairs)}
        for index, (weight, x, grad) in enumerate(pairs):
            _accumulate(weight, weight_grad(x, grad))
            if done is not None and last[id(weight)] == index:
                done(weight)

    def weights(self, key: Key) -> list[Tensor]:
        """The weights that have a pair under `key`."""
        return [weight for weight, _, _ in self._pairs.get(key, [])]

    def clear(self) -> None:
        """Forget everything (a step that failed)."""
        self._pairs.clear()


def weight_grad(x: Tensor, grad: Tensor) -> Tensor:
    """x [..., I] and output gradient [..., O] -> the weight's gradient [O, I]."""
    return grad.flatten(0, -2).T @ x.flatten(0, -2)


def _accumulate(weight: Tensor, grad: Tensor) -> None:
    """Add the gradient of this rank's part of a parameter to `.grad`, in the parameter's own format and placement."""
    if weight.grad is None:
        weight.grad = _as_gradient(grad, weight)
    else:
        local_tensor(weight.grad).add_(grad.to(weight.dtype))


def _as_gradient(grad: Tensor, weight: Tensor) -> Tensor:
    """The gradient of this rank's part of a parameter, in the parameter's own format and placement."""
    grad = grad.to(weight.dtype)
    return DTensor(grad, weight._spec, requires_grad=False) if isinstance(weight, DTensor) else grad


class _Linear(torch.autograd.Function):
    """x W^T + b; backward hands the weight's half to the queue while that is open."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, queue: WeightQueue) -> Tensor:
        plain = local(weight, x.dtype)
        ctx.queue, ctx.weight = queue, weight
        ctx.save_for_backward(x, plain)
        return torch.nn.functional.linear(x, plain, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, plain = ctx.saved_tensors
        wants_x, wants_weight, wants_bias, _ = ctx.needs_input_grad
        grad = grads[0]
        of_weight = None
        if wants_weight and ctx.queue.open:
            ctx.queue.put(ctx.weight, x, grad)
        elif wants_weight:
            of_weight = _as_gradient(weight_grad(x, grad), ctx.weight)
        of_bias = grad.flatten(0, -2).sum(0) if wants_bias else None
        return (grad @ plain if wants_x else None), of_weight, of_bias, None


def deferred_linear(x: Tensor, weight: Tensor, bias: Tensor | None, queue: WeightQueue) -> Tensor:
    """A linear layer whose weight gradient `queue` may put off.

    Args:
        x: [..., I]; the computation runs in its format.
        weight: the parameter [O, I] itself, plain or DTensor, in its master format.
        bias: [O] in the format of `x`, or None.
        queue: takes the weight's half of backward.

    Returns:
        [..., O].
    """
    return cast(Tensor, _Linear.apply(x, weight, bias, queue))
