"""What a checkpoint holds of one rank, by global name, and the copy of it in host memory that is written from."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from mmlab.parallel.buckets import local_tensor
from mmlab.parallel.mesh import Mesh
from mmlab.plan import Plan
from mmlab.plan.schema import MODULES
from mmlab.train import kept, rng
from mmlab.train.build import Built, is_tied_copy

MODEL, OPTIMIZER = "model.", "optimizer."


def state_dict(plan: Plan, mesh: Mesh, built: Built, saving: bool) -> dict[str, Tensor]:
    """What this rank saves or loads into, by global name; the tensors share storage with the live ones.

    The last stage's copy of a tied embedding is loaded but not saved: the first stage's is the one that counts.
    """
    state: dict[str, Tensor] = built.zero.state_dict() if built.zero is not None else {}
    whole = built.part.named_parameters() if built.zero is None else built.zero.outside
    for name, param in whole:
        if not (saving and is_tied_copy(plan, mesh.place, name)):
            state[f"{MODEL}{name}"] = param.detach()
    for t in built.trained:
        if saving and is_tied_copy(plan, mesh.place, t.name):
            continue
        for key, value in built.optimizer.state(t).items():
            state[f"{OPTIMIZER}{t.name}.{key}"] = value
    return state


def saved_state(plan: Plan, mesh: Mesh, built: Built) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """(what changes from step to step, what is frozen by module): all that this rank saves."""
    state = state_dict(plan, mesh, built, saving=True) | kept.saved(plan, mesh, built)
    if mesh.place.rank == 0:
        state |= rng.states(mesh.device)
    still = frozen_names(built)
    frozen: dict[str, dict[str, Tensor]] = {}
    for key in [key for key in state if key.removeprefix(MODEL) in still]:
        frozen.setdefault(key.removeprefix(MODEL).split(".", 1)[0], {})[key] = state.pop(key)
    return state, frozen


def frozen_names(built: Built) -> set[str]:
    """Parameters that this rank holds and does not train."""
    names = {name for name, param in built.part.named_parameters() if not param.requires_grad}
    return names if built.zero is None else names | set(built.zero.engine.frozen)


def contents(mesh: Mesh, frozen: Mapping[str, Mapping[str, Tensor]]) -> dict[str, str]:
    """A hash of the whole content of each module's frozen part, whatever the layout; all ranks together.

    Each tensor is made whole, one at a time, and hashed (SHA-256 of format, shape and bytes). Of ranks that hold the
    same one, all compute it.
    """
    mine: dict[str, str] = {}
    for module in MODULES:
        for key in sorted(frozen.get(module, ())):
            value = frozen[module][key]
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            digest = hashlib.sha256(f"{whole.dtype} {tuple(whole.shape)}".encode())
            digest.update(whole.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
            mine[key] = digest.hexdigest()
    found = [mine]
    if mesh.control is not None:
        found = [{} for _ in range(mesh.world_size)]
        dist.all_gather_object(found, mine, group=mesh.control)
    every = {key: value for part in found for key, value in part.items()}
    names = {module: sorted(k for k in every if k.startswith(f"{MODEL}{module}.")) for module in MODULES}
    return {
        module: hashlib.sha256("\n".join(f"{key} {every[key]}" for key in keys).encode()).hexdigest()
        for module, keys in names.items()
        if keys
    }


class Staging:
    """A copy of a rank's state in host memory, pinned beside CUDA. The memory is used again by the next copy."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: dict[str, Tensor] = {}

    def copy(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The state as it is now; what was copied before is overwritten."""
        locals_ = {key: local_tensor(value) for key, value in state.items()}
        self._buffers = {key: self._buffer(key, value) for key, value in locals_.items()}
        by_format: dict[torch.dtype, list[str]] = {}
        for key, value in locals_.items():
            by_format.setdefault(value.dtype, []).append(key)
        for keys in by_format.values():
            torch._foreach_copy_([self._buffers[k] for k in keys], [locals_[k] for k in keys], non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()
        return {key: self._like(value, self._buffers[key]) for key, value in state.items()}

    def _buffer(self, key: str, value: Tensor) -> Tensor:
        held = self._buffers.get(key)
        if held is not None and held.shape == value.shape and held.dtype == value.dtype:
            return held
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=self.device.type == "cuda")

    @staticmethod
    def _like(value: Tensor, copy: Tensor) -> Tensor:
        """The copy in the place of what it is of; not by `from_local`, which would move it to the mesh's device."""
        return DTensor(copy, value._spec, requires_grad=False) if isinstance(value, DTensor) else copy
