"""ZeRO (Rajbhandari et al. 2020) over the data-parallel ranks of a module.

zero2 and zero3 are FSDP2 (`fully_shard`): parameters, gradients and optimizer state live as rows of each tensor, one
share a rank; a unit (a decoder block) is gathered before it computes. zero2 keeps a gathered unit until its last
backward of the step, zero3 gathers it anew for each backward. zero1 is our own: weights and gradients stay whole,
each rank updates its rows and gathers the others' (`RowGather`). All three cut a tensor into the same rows, so
checkpoints and comparisons know one form only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from mmlab.parallel.buckets import Trained
from mmlab.parallel.compression.wire import Wire
from mmlab.parallel.scatter import IN_FLIGHT, ScatterSums
from mmlab.parallel.traffic import Traffic
from mmlab.plan.holders import shared
from mmlab.plan.layout import Layout
from mmlab.plan.schema import MODULES


@dataclass(frozen=True)
class ShardGroup:
    """The ranks that share one module's parameters out among them.

    `mesh` is one-dimensional over the group. `grid` has the tensor group as its second dim where there is one (both
    are slices of it), else it is `mesh`. `traffic` counts what is moved.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    mesh: DeviceMesh
    grid: DeviceMesh
    traffic: Traffic

    def rows(self, count: int) -> tuple[int, int]:
        """(first, one past last) of this rank's rows of `count`: as torch.chunk cuts, so late ranks may have none."""
        share = -(-count // self.size)
        return min(self.rank * share, count), min((self.rank + 1) * share, count)

    def placed(self, param: Tensor, rows: Tensor) -> DTensor:
        """This rank's rows of `param`, or of a moment of it, as a DTensor, as FSDP2 has it."""
        if not isinstance(param, DTensor):
            placements: tuple[Placement, ...] = (Shard(0),)
            return DTensor.from_local(rows, self.mesh, placements, shape=param.shape, stride=param.stride())
        (tensor_dim,) = param.placements
        split = isinstance(tensor_dim, Shard) and tensor_dim.dim == 0
        first = _StridedShard(0, split_factor=param.device_mesh.size()) if split else Shard(0)
        return DTensor.from_local(rows, self.grid, (first, tensor_dim), shape=param.shape, stride=param.stride())


def shard_groups(
    layout: Layout,
    rank: int,
    device: torch.device,
    tp_group: dist.ProcessGroup | None,
    timeout: timedelta,
    traffic: Traffic,
) -> dict[str, ShardGroup]:
    """The rank's group for each module that the plan shares out; all ranks together make all groups.

    They are groups of their own: FSDP2 and the reducer of what is whole must not depend on each other's order.
    """
    plan = layout.plan
    found: dict[str, ShardGroup] = {}
    for module in MODULES:
        if plan.parallel.engine != "native" or not shared(plan, module):
            continue
        for ranks in layout.copies(module):
            group = dist.new_group(ranks, timeout=timeout)
            if rank in ranks:
                tensor_group = tp_group if module == "language" else None
                mesh, grid = meshes(layout, rank, ranks, group, device, tensor_group)
                found[module] = ShardGroup(group, ranks.index(rank), len(ranks), mesh, grid, traffic)
    return found


def meshes(
    layout: Layout,
    rank: int,
    ranks: list[int],
    group: dist.ProcessGroup,
    device: torch.device,
    tp_group: dist.ProcessGroup | None,
) -> tuple[DeviceMesh, DeviceMesh]:
    """Meshes over ranks that hold copies of the same parameters: over them alone, and with the tensor group as the
    second dim where there is one (`mesh` and `grid` of a `ShardGroup`)."""
    if tp_group is None:
        mesh = DeviceMesh.from_group(group, device.type, mesh_dim_names=("dp",))
        return mesh, mesh
    # FSDP2 joins the two meshes, which must be slices of one. Tensor ranks are neighbours.
    first = [other - layout.place(rank).tp for other in ranks]
    table = [[start + tp for tp in range(layout.plan.parallel.tp)] for start in first]
    grid = DeviceMesh.from_group([group, tp_group], device.type, mesh=table, mesh_dim_names=("dp", "tp"))
    return grid["dp"], grid


class _Gathers(AllGather):
    """Counted all-gathers; on CPU they go on while the rank computes (on CUDA FSDP2 has streams for that)."""

    def __init__(self, traffic: Traffic, on_cpu: bool) -> None:
        self.traffic, self.on_cpu = traffic, on_cpu

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for what is gathered."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Start; FSDP2 waits before it uses the result."""
        self.traffic.add("sharding", input_tensor)
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op or self.on_cpu)


class Sharded:
    """A module under FSDP2.

    Args:
        module: whose parameters are to be sharded; its `forward` must contain every use of those in no unit.
        chains: submodules that are gathered one by one, in the order in which they run (a chain for each model chunk):
            while one computes, the next is on its way. What is left of `module` is one more, gathered while it runs.
        shards: the ranks.
        keep: keep what is gathered until the last backward of a step (zero2) rather than gather it anew (zero3).
        each: sum gradients after every backward rather than once a step.
    """

    def __init__(
        self,
        module: nn.Module,
        chains: Sequence[Sequence[nn.Module]],
        shards: ShardGroup,
        *,
        keep: bool,
        each: bool,
    ) -> None:
        self.keep, self.each = keep, each
        self.chains: list[list[FSDPModule]] = [
            [fully_shard(unit, mesh=shards.mesh, reshard_after_forward=not keep) for unit in chain] for chain in chains
        ]
        units = [unit for chain in self.chains for unit in chain]
        # What the module itself holds (table, final norm) is needed again as soon as backward begins.
        self.module = fully_shard(module, mesh=shards.mesh, reshard_after_forward=not (keep or units))
        self.units: list[FSDPModule] = [self.module, *units]
        on_cpu = shards.mesh.device_type == "cpu"
        wire, over_tp = Wire(shards.group, "sharding", shards.traffic), shards.grid is not shards.mesh
        self.sums = ScatterSums(wire, over_tp, started=on_cpu and not each)
        for unit in self.units:
            # The loss is a sum over the global count (decision 7): gradients are summed, and without this FSDP2 asks
            # for a product with 1.0 that gloo does not have.
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_custom_all_gather(_Gathers(shards.traffic, on_cpu))
        self.module.set_reduce_scatter_unused_params(True)  # the same reductions on ranks with and without an image
        for chain in self.chains:
            for before, after in pairwise(chain):
                before.set_modules_to_forward_prefetch([after])
                after.set_modules_to_backward_prefetch([before])
        if len(self.chains) == 1 and units:
            self.module.set_modules_to_forward_prefetch(units[:1])

    def reduce(self, trained: Iterable[Trained], undoable: bool) -> ScatterSums:
        """Take over the reductions of gradients; `undoable` whether a step may turn out to be left out (fp16)."""
        self.sums.attach(self.units, {id(t.param): t for t in trained}, undoable)
        return self.sums

    def before_backward(self, chain: int, closes: bool, last: bool) -> None:
        """Say what the coming backward is: of which chain, whether the step's last one of that chain, and the last at
        all. Gradients of a chain are reduced when it closes, what is in no chain at the end."""
        self.module.set_is_last_backward(last)
        self._set(self.module, closing=last, reduce=last or self.each)
        for number, units in enumerate(self.chains):
            closing = closes and number == chain
            for unit in units:
                self._set(unit, closing, reduce=closing or (self.each and number == chain))

    def _set(self, unit: FSDPModule, closing: bool, reduce: bool) -> None:
        unit.set_requires_gradient_sync(reduce, recurse=False)
        unit.set_reshard_after_backward(closing or not self.keep, recurse=False)

    def finish(self) -> None:
        """Wait for the gradients, and drop what is gathered where a forward had no backward."""
        self.sums.wait()
        for unit in self.units:
            unit.reshard()


class RowGather:
    """The end of a zero1 step: every rank's updated rows of every parameter, on all ranks.

    `wholes` are the local tensors (of one dtype) of the parameters; a parameter's rows are `shards.rows(len(whole))`.
    `bytes_` bounds what one collective carries and so the memory it needs besides.
    """

    def __init__(self, wholes: Iterable[Tensor], shards: ShardGroup, bytes_: float) -> None:
        self.shards = shards
        self.buckets: list[list[Tensor]] = []
        size = 0.0
        for whole in wholes:
            added = whole.numel() * whole.element_size()
            if not self.buckets or size + added > bytes_:
                self.buckets.append([])
                size = 0.0
            self.buckets[-1].append(whole)
            size += added

    def _packed(self, bucket: list[Tensor]) -> Tensor:
        """[ranks, their rows one after the other], so far with this rank's alone."""
        parts = [whole[slice(*self.shards.rows(len(whole)))] for whole in bucket]
        shares = [-(-len(whole) // self.shards.size) * whole[0].numel() for whole in bucket]
        flat = bucket[0].new_empty(self.shards.size, sum(shares))
        places = flat[self.shards.rank].split(shares)
        torch._foreach_copy_(
            [place[: part.numel()].view_as(part) for place, part in zip(places, parts, strict=True)], parts
        )
        return flat

    def _unpack(self, bucket: list[Tensor], flat: Tensor, work: dist.Work | None) -> None:
        """Every rank's rows into the parameters, once they have come."""
        if work is not None:
            work.wait()
        there, here, offset = [], [], 0
        for whole in bucket:
            share = -(-len(whole) // self.shards.size)
            rows = whole.split(share)  # fewer than ranks where there are fewer rows
            there += rows
            here += [flat[rank, offset : offset + part.numel()].view_as(part) for rank, part in enumerate(rows)]
            offset += share * whole[0].numel()
        torch._foreach_copy_(there, here)

    def __call__(self) -> None:
        """Gather; all ranks of the group together."""
        under_way: list[tuple[list[Tensor], Tensor, dist.Work | None]] = []
        for bucket in self.buckets:
            if len(under_way) >= IN_FLIGHT:
                self._unpack(*under_way.pop(0))
            flat = self._packed(bucket)
            mine = flat[self.shards.rank]
            self.shards.traffic.add("sharding", mine)
            work = dist.all_gather_into_tensor(flat.view(-1), mine, group=self.shards.group, async_op=True)
            under_way.append((bucket, flat, work))
        for entry in under_way:
            self._unpack(*entry)
