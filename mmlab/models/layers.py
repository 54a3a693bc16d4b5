"""What the encoder, the projector and the decoder share: linear layers, norms and attention's arrangement of heads.

Layers hold parameters in the master format (possibly as DTensors) and compute in `dtype` on `local()` tensors.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmlab.models.initial import MakeParameter
from mmlab.parallel.deferred import WeightQueue, deferred_linear
from mmlab.parallel.tensor import at_least_float32, local


def without_half(x: Tensor) -> Tensor:
    """In float32 what is float16, whose range (65504) sums of squares and exponents leave; others as they are."""
    return x.float() if x.dtype == torch.float16 else x


class Table(nn.Module):
    """A weight matrix [V, D] by itself, with the name of torch.nn.Embedding: looked up, added or multiplied with."""

    def __init__(self, make: MakeParameter, name: str) -> None:
        super().__init__()
        self.weight = make(f"{name}.weight")
        self.queue: WeightQueue | None = None

    def project(self, x: Tensor) -> Tensor:
        """Products with every row: [..., D] -> [..., V] in the format of `x`."""
        return _product(x, self.weight, None, self.queue)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, queue: WeightQueue | None) -> Tensor:
    if queue is not None and weight.requires_grad and torch.is_grad_enabled():
        return deferred_linear(x, weight, bias, queue)
    return F.linear(x, local(weight, x.dtype), bias)


class Linear(nn.Module):
    """x [..., I] -> x W^T + b [..., O], with the names of torch.nn.Linear; the bias is optional.

    After `adapt`, (alpha / r) x A^T B^T is added (LoRA, Hu et al. 2021). Under tensor parallelism the factor that meets
    a split dim of W is split with it, so the layer's own collectives serve the adapter too. `queue` may put off the
    weight's half of backward (`defer_weights`).
    """

    def __init__(self, make: MakeParameter, name: str, *, bias: bool = True) -> None:
        super().__init__()
        self.weight = make(f"{name}.weight")
        self.bias = make(f"{name}.bias") if bias else None
        self.lora_A: Table | None = None
        self.lora_B: Table | None = None
        self.lora_scale = 0.0
        self.queue: WeightQueue | None = None

    def adapt(self, make: MakeParameter, name: str, scale: float) -> None:
        """Add an adapter; `scale` is alpha / r."""
        self.lora_A, self.lora_B = Table(make, f"{name}.lora_A"), Table(make, f"{name}.lora_B")
        self.lora_scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """Compute in the format of `x`."""
        bias = None if self.bias is None else local(self.bias, x.dtype)
        y = _product(x, self.weight, bias, self.queue)
        if self.lora_A is None or self.lora_B is None:
            return y
        return y + self.lora_B.project(self.lora_A.project(x) * self.lora_scale)


def defer_weights(module: nn.Module, queue: WeightQueue) -> None:
    """Let `queue` put off the weight gradients of all linear layers of a module (zero-bubble schedules)."""
    for each in module.modules():
        if isinstance(each, Linear | Table):
            each.queue = queue


class LayerNorm(nn.Module):
    """Layer normalisation over the last dim; statistics in at least float32 (torch), with float16 all of it."""

    def __init__(self, make: MakeParameter, name: str, eps: float) -> None:
        super().__init__()
        self.weight = make(f"{name}.weight")
        self.bias = make(f"{name}.bias")
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D] in the format of `x`."""
        wide = without_half(x)
        weight, bias = local(self.weight, wide.dtype), local(self.bias, wide.dtype)
        return F.layer_norm(wide, weight.shape, weight, bias, self.eps).to(x.dtype)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dim (Zhang and Sennrich 2019), statistics in at least float32."""

    def __init__(self, make: MakeParameter, name: str, eps: float) -> None:
        super().__init__()
        self.weight = make(f"{name}.weight")
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., D] in the format of `x`."""
        wide = x.to(at_least_float32(x.dtype))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return local(self.weight, x.dtype) * wide.to(x.dtype)


def run_block(block: Callable[..., Tensor], recompute: bool, *args: object) -> Tensor:
    """`block(*args)`; with `recompute`, its activations are computed again in backward instead of kept."""
    if recompute and torch.is_grad_enabled():
        # Blocks draw no random numbers, so there is no generator state to keep.
        return checkpoint(block, *args, use_reentrant=False, preserve_rng_state=False)
    return block(*args)
