"""DeepSpeed inside our process groups: started, read and written parameter by parameter, left without a trace.

ZeRO (Rajbhandari et al. 2020) keeps masters, moments and gradients as flat partitions. `ZeroEngine` says which range of
which parameter this rank owns, so that norms, checkpoints and `mmlab verify` see tensors under our global names.

deepspeed is imported here alone, and only when a rank makes an engine: the import takes seconds.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmlab.parallel.mesh import GROUP_TIMEOUT

STATES = ("exp_avg", "exp_avg_sq")
"""AdamW's tensors of a parameter."""


@dataclass(frozen=True)
class Piece:
    """What this rank owns of one parameter: elements [start, start + count) of the flattened whole."""

    start: int
    count: int


class Backend:
    """DeepSpeed's own start and end, around all engines of a run.

    On CPU its start compiles a shared-memory all-reduce (70 s, and it fails without a compiler) that nothing but its
    inference uses: an accelerator of our own says that this op is not there, nor fp16.
    """

    def __init__(self, device: torch.device, local_rank: int) -> None:
        import deepspeed
        from deepspeed.accelerator import get_accelerator, set_accelerator
        from deepspeed.runtime.zero.partition_parameters import Init

        # ZeRO-3 numbers parameters on and on and compares the numbers of all ranks: processes that have trained other
        # plans before must not differ.
        Init.param_id = 0
        self._local_rank = os.environ.get("LOCAL_RANK")
        os.environ["LOCAL_RANK"] = str(local_rank)  # read from there all along
        self._before = get_accelerator()
        backend = "gloo" if device.type == "cpu" else "nccl"
        if not dist.is_initialized():  # a plan of one rank
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        if device.type == "cpu":
            set_accelerator(_plain_cpu())
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False, timeout=GROUP_TIMEOUT)

    def close(self) -> None:
        """Forget the process group, so that another run can start in this process.

        DeepSpeed keeps groups, backend and the modules of every engine in module globals; its own
        `destroy_process_group` leaves the last two behind.
        """
        from deepspeed.accelerator import set_accelerator
        from deepspeed.comm import comm
        from deepspeed.runtime.zero import parameter_offload
        from deepspeed.utils import groups

        groups._release_process_group_references(group=None)
        comm.cdb = None
        parameter_offload.FWD_MODULE_STACK.clear()
        set_accelerator(self._before)
        del os.environ["LOCAL_RANK"]
        if self._local_rank is not None:
            os.environ["LOCAL_RANK"] = self._local_rank


def _plain_cpu() -> Any:
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    class PlainCpu(CPU_Accelerator):
        """DeepSpeed's CPU without what it would have to compile."""

        def create_op_builder(self, op_name: str) -> Any:
            return None if op_name == "ShareMemCommBuilder" else super().create_op_builder(op_name)

        def is_fp16_supported(self) -> bool:
            return False

    return PlainCpu()


def _engine_class(wide: bool) -> Any:
    """DeepSpeed's engine; with `wide` one that communicates and accumulates float64 as it is.

    Its settings know no float64: without this, gradients of a float64 model would be reduced in float32.
    """
    from deepspeed.runtime.engine import DeepSpeedEngine

    if not wide:
        return DeepSpeedEngine

    class WideEngine(DeepSpeedEngine):
        """The same engine in float64 (`mmlab verify`)."""

        communication_data_type = torch.float64

        def get_data_types(self) -> tuple[torch.dtype, torch.dtype]:
            return torch.float64, torch.float64

        def zero_reduce_scatter(self) -> bool:
            return False  # asserts a format of at most 32 bits

        def zero_contiguous_gradients(self) -> bool:
            return self.zero_optimization_stage() < 3 and bool(super().zero_contiguous_gradients())

    return WideEngine


class ZeroEngine:
    """One DeepSpeed engine over the parameters of `module`, which are named globally.

    `groups` are AdamW's parameter groups (`params`, `lr`, `betas`, ... and `module`, a name of ours); frozen
    parameters are in none. `external` are parameters that are used outside the forward of the module that holds
    them (tables that are only looked up): ZeRO-3 gathers them with the whole. With `once` the gradients of a step are
    kept whole and reduced at its end, else after each backward.
    """

    def __init__(
        self, module: nn.Module, groups: list[dict[str, Any]], config: Mapping[str, Any],
        external: list[nn.Parameter], *, once: bool,
    ) -> None:  # fmt: skip
        from deepspeed.runtime.config import DeepSpeedConfig
        from deepspeed.runtime.zero.partition_parameters import register_external_parameter

        self.wide = any(p.dtype == torch.float64 for p in module.parameters())
        settings = dict(config)
        self.engine = _engine_class(self.wide)(
            args=None, model=module, model_parameters=groups, config=settings, config_class=DeepSpeedConfig(settings)
        )
        self.zero = self.engine.optimizer
        self.once = once
        self._collecting: Any = None
        if once:
            self.engine.set_gradient_accumulation_boundary(True)
        self.partitioned = self.engine.zero_optimization_stage() == 3
        if self.partitioned:
            for number, part in enumerate(module.modules()):
                part.ds_id = number  # type: ignore[assignment]  # numbered on and on as well
            for param in external:
                register_external_parameter(module, param)
        named = dict[str, Any](module.named_parameters())  # Any: DeepSpeed gives parameters attributes of its own
        self.params = {name: param for name, param in named.items() if param.requires_grad}
        self.frozen = {name: param for name, param in named.items() if not param.requires_grad}
        self._make_states()

    # -- a step

    def __call__(self, *inputs: Any) -> Tensor:
        """Forward of the module; all ranks together."""
        output: Tensor = self.engine(*inputs)
        return output

    def backward(self, loss: Tensor) -> None:
        """Backward of a microbatch; its loss is summed over microbatches and over ranks."""
        # ZeRO-3 can only average over ranks: undone here, in all stages alike.
        self.engine.backward(loss * dist.get_world_size(), scale_wrt_gas=False)

    def begin_step(self) -> None:
        """Before the first backward of a step."""
        if self.once:
            self._collecting = self.engine.coalesce_grad_reduction()
            self._collecting.__enter__()

    def next_microbatch(self) -> None:
        """Between two backwards of a step."""
        if not self.once:
            self.engine.step()

    def end_step(self) -> None:
        """After the last backward of a step: gradients are reduced then."""
        if self._collecting is not None:
            self._collecting.__exit__(None, None, None)
            self._collecting = None

    def update(self, rates: Mapping[str, float], decays: Mapping[str, float], factor: float) -> None:
        """Multiply all gradients with `factor` (clipping) and update with each module's rate and decay."""
        for group in self.zero.param_groups:
            group["lr"] = rates[group["module"]]
            group["weight_decay"] = decays[group["module"]] if group["decay"] else 0.0
        if factor != 1.0:
            # DeepSpeed divides gradients by the loss scale right before the update, in every stage and offload mode.
            self.zero.override_loss_scale(1.0 / factor)
        self.engine.step()
        if factor != 1.0:
            self.zero.override_loss_scale(1.0)

    # -- what this rank owns

    @property
    def _masters(self) -> list[Tensor]:
        """Flat partitions of the master weights, one a group (ZeRO-3: one a sub-group)."""
        zero = self.zero
        found: list[Tensor] = (
            zero.fp32_partitioned_groups_flat if self.partitioned else zero.single_partition_of_fp32_groups
        )
        return found

    def _make_states(self) -> None:
        """AdamW's state, made now rather than at the first step, so that a checkpoint can load into it."""
        for index, master in enumerate(self._masters):
            if self.wide:
                self._widen(index, master)
            state = self.zero.optimizer.state[master]
            state["step"] = torch.zeros((), dtype=torch.float32, device=master.device)
            for key in STATES:
                state[key] = torch.zeros_like(master)

    def _widen(self, index: int, master: Tensor) -> None:
        """Masters are float32 whatever the model is: take the model's own float64 values instead."""
        zero = self.zero
        zero.master_weights_and_grads_dtype = torch.float64
        if self.partitioned:
            whole = zero.fp16_partitioned_groups_flat[index]
        else:
            whole = zero.parallel_partitioned_bit16_groups[index][dist.get_rank()]
        master.data = whole.detach().to(master.device).clone()
        if master.grad is not None:
            grad, master.grad = master.grad, None
            master.grad = grad.to(torch.float64)

    def piece(self, name: str) -> Piece:
        """Which elements of a parameter this rank owns; maybe none."""
        param = self.params[name]
        if self.partitioned:
            size = param.partition_numel()
            start = min(size * dist.get_rank(), param.ds_numel)
            return Piece(start, min(size, param.ds_numel - start))
        address = None if param._hp_mapping is None else param._hp_mapping.lp_fragment_address
        return Piece(0, 0) if address is None else Piece(address.start, address.numel)

    def shape(self, name: str) -> torch.Size:
        """Global shape of a parameter."""
        param = self.params.get(name, self.frozen.get(name))
        assert param is not None
        return getattr(param, "ds_shape", param.shape)

    def grad(self, name: str) -> Tensor:
        """This rank's piece of a parameter's reduced gradient, flat, between the last backward and the update."""
        param, count = self.params[name], self.piece(name).count
        if self.partitioned:
            return self.zero._get_fp32_grad_state_partition(param, release_swap_buffers=True)[0][:count]
        if param._hp_mapping is None:
            return torch.zeros(0, dtype=param.dtype, device=param.device)
        mapping = param._hp_mapping
        if self.zero.cpu_offload:
            grad = self._masters[mapping.param_group_index].grad
            return grad.narrow(0, mapping.hp_fragment_address.start, count)
        return mapping.get_lp_grad_fragment(param._index_in_param_group).flatten()

    def value(self, name: str, key: str = "") -> Tensor:
        """This rank's piece of a master weight, or of an optimizer state (STATES), flat."""
        param, count = self.params[name], self.piece(name).count
        if self.partitioned:
            return self.zero._get_fp32_opt_state_partition(param, True, key or None)[0][:count]
        if param._hp_mapping is None:
            return torch.zeros(0, dtype=param.dtype, device=param.device)
        mapping = param._hp_mapping
        master = self._masters[mapping.param_group_index]
        flat = self.zero.optimizer.state[master][key] if key else master.detach()
        return flat.narrow(0, mapping.hp_fragment_address.start, count)

    def steps(self, name: str) -> Tensor:
        """AdamW's count of updates (scalar, live), shared by all parameters of a group."""
        return self.zero.optimizer.state[self._master_of(self.params[name])]["step"]

    def _master_of(self, param: nn.Parameter) -> Tensor:
        if self.partitioned:
            return self._masters[self.zero.grad_position[self.zero.get_param_id(param)][0]]
        index = next(i for i, group in enumerate(self.zero.bit16_groups) if any(p is param for p in group))
        return self._masters[index]

    def whole(self, name: str, mine: Tensor) -> Tensor:
        """A tensor of the parameter's shape on every rank, from all ranks' pieces; all ranks together."""
        piece = self.piece(name)
        full = torch.zeros(self.shape(name).numel(), dtype=mine.dtype, device=self.device)
        full[piece.start : piece.start + piece.count] = mine
        dist.all_reduce(full)
        return full.view(self.shape(name))

    def frozen_weight(self, name: str) -> Tensor:
        """A copy of a frozen parameter, whole; all ranks together."""
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters

        with GatheredParameters([self.frozen[name]], enabled=self.partitioned):
            return self.frozen[name].detach().clone()

    # -- from a checkpoint

    def set_value(self, name: str, whole: Tensor, key: str = "") -> None:
        """Take this rank's piece of a master weight or optimizer state from a whole tensor."""
        param, piece = self.params[name], self.piece(name)
        mine = whole.flatten()[piece.start : piece.start + piece.count]
        if self.partitioned:  # with the padding of the last rank; DeepSpeed writes it to NVMe where it belongs
            padded = torch.zeros(param.partition_numel(), dtype=mine.dtype, device=mine.device)
            padded[: piece.count] = mine
            self.zero.set_local_hp_param(padded, param, key or None)
        elif piece.count:
            self.value(name, key).copy_(mine)

    def set_frozen(self, name: str, whole: Tensor) -> None:
        """Set a frozen parameter; all ranks together."""
        from deepspeed.runtime.zero.partition_parameters import GatheredParameters

        with GatheredParameters([self.frozen[name]], modifier_rank=0, enabled=self.partitioned), torch.no_grad():
            self.frozen[name].copy_(whole)

    def masters_changed(self) -> None:
        """Bring the weights that forward uses up to date with the masters; all ranks together."""
        if not self.partitioned:
            self.zero.update_lp_params()
            return
        self.zero._partition_all_parameters()
        for index in range(len(self._masters)):
            self.zero._reassign_or_swap_out_partitioned_parameters(index)
        whole = self.zero.persistent_parameters
        if whole:
            whole[0].all_gather(whole)

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return torch.device(self.engine.device)

    @property
    def dtype(self) -> torch.dtype:
        """Format of master weights and optimizer state."""
        return torch.float64 if self.wide else torch.float32

    def close(self) -> None:
        """Take DeepSpeed's hooks off the module and drop its buffers."""
        self.engine.destroy()

    def abandon(self) -> None:
        """End a step that broke off. Its gradients would be reduced wherever the open context is dropped, so this
        comes after the backend's end, when that can only fail, at once."""
        if self._collecting is not None:
            with contextlib.suppress(Exception):
                self._collecting.gen.close()
            self._collecting = None
