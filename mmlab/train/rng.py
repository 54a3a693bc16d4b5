"""The global random streams of a rank: Python's, NumPy's and torch's.

Nothing that training computes draws from them: shuffling, fresh weights and PowerSGD's factors have keyed streams of
their own. They are for code that a user adds: every rank begins with the same streams, and a checkpoint keeps rank 0's,
so what such code draws depends neither on the rank nor on where the run was interrupted.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

PREFIX = "rng."
"""What names of these tensors in checkpoints begin with."""


def seed(value: int, device: torch.device) -> None:
    """Begin all streams anew, on every rank alike."""
    random.seed(value)
    np.random.seed(value % (1 << 32))
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.manual_seed(value)


def _bytes(value: object) -> Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def states(device: torch.device) -> dict[str, Tensor]:
    """Where the streams stand, as tensors of bytes [n] by name in a checkpoint."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    assert isinstance(keys, np.ndarray)
    found = {
        f"{PREFIX}python": _bytes(random.getstate()),
        f"{PREFIX}numpy": _bytes([kind, keys.tolist(), *rest]),
        f"{PREFIX}torch": torch.get_rng_state(),
    }
    if device.type == "cuda":
        found[f"{PREFIX}cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore(found: Mapping[str, Tensor], device: torch.device) -> None:
    """Stand where streams were saved; those that are not there stay where they are."""
    given = {key.removeprefix(PREFIX): value for key, value in found.items()}
    if "python" in given:
        version, keys, gauss = json.loads(bytes(given["python"].numpy()))
        random.setstate((version, tuple(keys), gauss))
    if "numpy" in given:
        kind, keys, *rest = json.loads(bytes(given["numpy"].numpy()))
        np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    if "torch" in given:
        torch.set_rng_state(given["torch"])
    if "cuda" in given and device.type == "cuda":
        torch.cuda.set_rng_state(given["cuda"], device)
