"""A rank's share of a run under DeepSpeed: what it holds, what mmlab holds beside it, and both as one state."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from mmlab.models.build import plain_model
from mmlab.models.weights import init_from
from mmlab.models.whole import Whole
from mmlab.parallel.deepspeed import STATES, Backend, ZeroEngine
from mmlab.parallel.gradients import squared_norms
from mmlab.parallel.mesh import Mesh
from mmlab.plan import deepspeed as settings
from mmlab.plan.schema import Plan
from mmlab.train.optim import parameter_groups
from mmlab.train.precision import master_dtype


class ZeroModel:
    """The modules that a DeepSpeed engine holds, under our global names.

    The engine and its groups end with the mesh (`close_mesh`).
    """

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        mates = [place.rank for place in mesh.layout.places if place.node == mesh.place.node]
        self.backend = Backend(mesh.device, mates.index(mesh.place.rank))
        mesh.closing.append(self.close)
        self.part = plain_model(plan, master_dtype(plan), mesh.device)
        init_from(self.part, plan)
        inside = settings.inside(plan)
        beside = [module for module in settings.KEPT_WHOLE if module in inside]
        trains = any(not getattr(plan.train, module).frozen for module in beside)
        accompany = bool(beside) and (settings.stage(plan) == 3 or trains)
        whole = Whole(self.part, inside, plan.model.vision.image_size, accompany=accompany)
        names = {id(p) for p in whole.parameters()}
        self.outside = [(n, p) for n, p in self.part.named_parameters() if id(p) not in names]
        """Parameters that DeepSpeed does not hold."""
        trained = ((name.split(".", 1)[0], p) for name, p in whole.named_parameters() if p.requires_grad)
        groups, once = parameter_groups(plan, trained), settings.reduces_once(plan)
        self.engine = ZeroEngine(whole, groups, settings.config(plan), whole.tables(), once=once)
        self.rank, self.world = mesh.place.rank, mesh.world_size

    def close(self) -> None:
        """End the engine and DeepSpeed's own groups."""
        engine: ZeroEngine | None = getattr(self, "engine", None)
        if engine is not None:
            engine.close()
        self.backend.close()
        if engine is not None:
            engine.abandon()

    def whole_tensors(self, what: str) -> dict[str, Tensor]:
        """Whole "grads" or "weights" of what DeepSpeed holds, on every rank; all ranks together."""
        engine = self.engine
        if what == "grads":
            return {name: engine.whole(name, engine.grad(name)) for name in engine.params}
        weights = {name: engine.whole(name, engine.value(name)) for name in engine.params}
        return weights | {name: engine.frozen_weight(name) for name in engine.frozen}

    def squared_norms(self, modules: tuple[str, ...]) -> Tensor:
        """This rank's share of the squared gradient norm of each module, float64 [len(modules)]."""
        pieces = ((name.split(".", 1)[0], self.engine.grad(name)) for name in self.engine.params)
        return squared_norms(modules, ((module, piece) for module, piece in pieces if piece.numel()))

    def off_device_bytes(self, plan: Plan) -> int:
        """Bytes of this rank's share that offload keeps off the device: masters, moments and gradients, and the weights
        themselves where parameters are offloaded."""
        if plan.offload.mode == "none":
            return 0
        copies = len(STATES) + (2 if plan.offload.mode == "optimizer" else 3)
        elements = sum(self.engine.piece(name).count for name in self.engine.params)
        return copies * elements * torch.finfo(self.engine.dtype).bits // 8

    # -- checkpoints: each rank writes and reads whole tensors, every world-th one

    def _entries(self) -> list[tuple[str, str, str]]:
        """(key in a checkpoint, parameter, state) of each tensor, the same list on all ranks."""
        engine = self.engine
        weights = [(f"model.{name}", name, "") for name in (*engine.params, *engine.frozen)]
        states = [(f"optimizer.{name}.{key}", name, key) for name in engine.params for key in (*STATES, "step")]
        return weights + states

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's share of the checkpoint: copies, whole, of every world-th tensor; all ranks together.

        One tensor at a time is gathered, so a rank needs room for its share and for one tensor besides.
        """
        state = {}
        for number, (key, name, what) in enumerate(self._entries()):
            found = self._gathered(name, what)
            if number % self.world == self.rank:
                state[key] = found
        return state

    def _gathered(self, name: str, what: str) -> Tensor:
        if what == "step":
            return self.engine.steps(name).clone()
        if name in self.engine.frozen:
            return self.engine.frozen_weight(name)
        return self.engine.whole(name, self.engine.value(name, what))

    def take(self, state: dict[str, Tensor]) -> None:
        """Put what was loaded into the tensors of `state_dict` into the engine; all ranks together."""
        engine = self.engine
        for number, (key, name, what) in enumerate(self._entries()):
            owner = number % self.world
            shape = torch.Size(()) if what == "step" else engine.shape(name)
            dtype = torch.float32 if what == "step" else engine.dtype
            value = state[key] if owner == self.rank else torch.empty(shape, dtype=dtype, device=engine.device)
            if self.world > 1:
                dist.broadcast(value, owner)
            if what == "step":
                engine.steps(name).copy_(value)
            elif name in engine.frozen:
                engine.set_frozen(name, value)
            else:
                engine.set_value(name, value, what)
        engine.masters_changed()
