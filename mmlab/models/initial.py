"""Parameters made from the seed and their global names alone, each rank its own shard.

A parameter is cut along its tensor-parallel dim into blocks whose borders depend on its global shape only. Each block
has a random stream of its own, keyed by (seed, name, block), so a rank generates just the blocks that overlap its shard
and every layout holds bitwise the same values. They are float64 from NumPy's Philox (the same on every platform), cast
to the master format.
"""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard

from mmlab.models.sharding import ParameterSpec, tp_dim
from mmlab.parallel.tensor import TensorGroup

MakeParameter = Callable[[str], nn.Parameter]
"""Makes this rank's part of the parameter with the given global name."""

BLOCKS = 64
"""Most blocks of one parameter: a rank generates at most 2/64 of a parameter in vain."""
BLOCK_ELEMENTS = 4096
"""Fewest elements of a block (but for the last): starting a stream costs as much as some thousand values."""


def initial_values(seed: int, name: str, spec: ParameterSpec, part: tuple[int, int, int]) -> Tensor:
    """The values of a slice of a parameter.

    Args:
        seed: `train.seed`.
        name: global name.
        spec: the whole parameter.
        part: (dim, start, stop): the slice along tensor dim `dim`, in elements.

    Returns:
        float64, contiguous; the same for a given (seed, name, spec, dim) however the parameter is cut.
    """
    dim, start, stop = part
    shape = (*spec.shape[:dim], stop - start, *spec.shape[dim + 1 :])
    if spec.init != "normal":
        return torch.full(shape, 1.0 if spec.init == "ones" else 0.0, dtype=torch.float64)
    values = np.empty(shape)
    size = spec.shape[dim]
    step = max(-(-size // BLOCKS), -(-BLOCK_ELEMENTS * size // spec.numel))
    for first in range(start - start % step, stop, step):
        last = min(first + step, size)
        key = sha256(f"{seed}/{name}/{first // step}".encode()).digest()[:16]
        stream = np.random.Generator(np.random.Philox(key=int.from_bytes(key, "little")))
        block = stream.standard_normal((*spec.shape[:dim], last - first, *spec.shape[dim + 1 :]))
        low, high = max(first, start), min(last, stop)
        _along(values, dim, low - start, high - start)[...] = _along(block, dim, low - first, high - first)
    return torch.from_numpy(values).mul_(spec.std)


def _along(array: np.ndarray, dim: int, start: int, stop: int) -> np.ndarray:
    """A view of `array` cut along `dim`."""
    return array[(slice(None),) * dim + (slice(start, stop),)]


def parameter_maker(
    specs: dict[str, ParameterSpec], seed: int, tp: TensorGroup, dtype: torch.dtype, device: torch.device
) -> MakeParameter:
    """A function from a global name to this rank's parameter, initialised.

    Args:
        specs: the model's parameters (`parameter_specs(plan)`).
        seed: `train.seed`.
        tp: the tensor-parallel group of the language model; parameters of the other modules are never split.
        dtype: format of the master weights.
        device: where they live.

    Returns:
        `make(name)`: a plain parameter, or with tp.size > 1 and a name in `language.` a DTensor on `tp.mesh`.
    """

    def make(name: str) -> nn.Parameter:
        spec = specs[name]
        split = tp_dim(name)
        dim = split or 0
        size = spec.shape[dim]
        start, stop = 0, size
        if split is not None and tp.size > 1:
            start, stop = size * tp.rank // tp.size, size * (tp.rank + 1) // tp.size
        values = initial_values(seed, name, spec, (dim, start, stop)).to(device=device, dtype=dtype)
        if tp.size == 1 or not name.startswith("language."):
            return nn.Parameter(values)
        placement = Replicate() if split is None else Shard(split)
        whole = torch.Size(spec.shape)
        stride = torch.empty(whole, device="meta").stride()
        return nn.Parameter(
            DTensor.from_local(values, tp.mesh, [placement], run_check=False, shape=whole, stride=stride)
        )

    return make
