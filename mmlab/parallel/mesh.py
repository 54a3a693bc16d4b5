"""The process groups of one rank, made anew for each generation of a run."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mmlab.parallel import shm
from mmlab.parallel.context.split import ContextGroup
from mmlab.parallel.exchange import Link
from mmlab.parallel.sharding import ShardGroup, shard_groups
from mmlab.parallel.tensor import TensorGroup
from mmlab.parallel.traffic import Traffic
from mmlab.plan.holders import beside_encoder
from mmlab.plan.layout import Layout, Place
from mmlab.plan.schema import MODULES, Plan

GROUP_TIMEOUT = datetime.timedelta(hours=6)
"""How long a collective may wait: longer than the longest work that one rank does alone (checksums of a checkpoint,
pictures of an evaluation). Lost and failed ranks are found by other means within seconds (`train.worker`)."""


@dataclass
class Mesh:
    """What a rank needs to talk to the others.

    `reductions[module]` is the group of the ranks that hold the same parameters of a module and see other data,
    `embedding` the first and last stage's pair for tied embeddings; None where there is nobody else. `control` carries
    the step's own reduction and the commands, on CPU tensors whatever the device. `traffic` counts what is sent.
    `shards[module]` is there for modules that are shared out (ZeRO).
    """

    layout: Layout
    place: Place
    device: torch.device
    control: dist.ProcessGroup | None
    tp: TensorGroup
    cp: ContextGroup
    reductions: Mapping[str, dist.ProcessGroup | None]
    embedding: dist.ProcessGroup | None
    forward: Link
    backward: Link
    traffic: Traffic
    shards: Mapping[str, ShardGroup] = field(default_factory=dict)
    token_links: tuple[Link, Link] | None = None
    """Links of image tokens and of their gradients, where they cannot share those of the pipeline."""
    store: dist.Store | None = None
    """The rendezvous store; None for a plan of one rank."""
    closing: list[Callable[[], None]] = field(default_factory=list)
    """What is to be ended before the groups are, the last one first."""

    @property
    def tokens(self) -> Link:
        """What image tokens travel by."""
        return self.token_links[0] if self.token_links else self.forward

    @property
    def token_grads(self) -> Link:
        """What gradients of image tokens travel by."""
        return self.token_links[1] if self.token_links else self.backward

    @property
    def links(self) -> list[Link]:
        """All links."""
        return [self.forward, self.backward, *(self.token_links or ())]

    @property
    def transports(self) -> list[str]:
        """What the groups of this rank talk through, with the reason where it is not the best there is."""
        if self.control is None:
            return []
        if self.device.type == "cuda":
            return ["NCCL"]
        return shm.transports() or [f"gloo ({reason})" if (reason := shm.refusal()) else "gloo"]

    @property
    def world_size(self) -> int:
        """Ranks of the run."""
        return len(self.layout.places)


def _my_group(groups: list[list[int]], rank: int, what: str) -> dist.ProcessGroup | None:
    """Make all groups (every rank takes part in making each) and return this rank's; groups of one are none.

    `what` they are for is what a diagnosis of a stuck run calls them.
    """
    mine = None
    for ranks in groups:
        if len(ranks) < 2:
            continue
        group = dist.new_group(ranks, timeout=GROUP_TIMEOUT, group_desc=what)
        if rank in ranks:
            mine = group
    return mine


def _backend(plan: Plan, device: torch.device) -> str:
    """torch's name of what the ranks talk through."""
    if device.type == "cuda":
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "2")  # an abort is not to end the process
        return "cpu:gloo,cuda:nccl"
    if plan.cluster.collectives == "gloo" or (plan.cluster.collectives == "auto" and shm.refusal()):
        return "gloo"
    shm.register(int(1e6 * plan.cluster.shm_mb))  # a group takes gloo by itself where it cannot have shared memory
    return "shm"


def build_mesh(plan: Plan, layout: Layout, rank: int, store: dist.Store | None, device: torch.device) -> Mesh:
    """Start torch.distributed for this rank and make every group of the plan.

    `store` is None when the environment says where the rendezvous is (torchrun). A plan of one rank needs no groups.
    """
    place = layout.place(rank)
    alone, traffic = TensorGroup(), Traffic()
    if len(layout.places) == 1:
        forward_link, backward_link = (Link(None, rank, device, traffic) for _ in range(2))
        return Mesh(layout, place, device, None, alone, ContextGroup(), {}, None, forward_link, backward_link, traffic)
    # Groups are named by this count. One that broke off while it was made has counted on some ranks only: the next
    # generation's would wait for each other under different names until the store's time is over, 120 s.
    dist.distributed_c10d._world.group_count = 0
    dist.init_process_group(
        _backend(plan, device), store=store, rank=rank, world_size=len(layout.places), timeout=GROUP_TIMEOUT,
        device_id=device if device.type == "cuda" else None,
    )  # fmt: skip
    everyone = list(range(len(layout.places)))
    forward, backward, control = (_my_group([everyone], rank, what) for what in ("forward", "backward", "control"))
    forward_down = backward_down = None
    if plan.parallel.chunks_per_rank > 1:
        forward_down, backward_down = (_my_group([everyone], rank, f"{what} down") for what in ("forward", "backward"))
    tp_group = _my_group(layout.tp_groups, rank, "tp")
    cp_group = _my_group(layout.cp_groups, rank, "cp")
    language_group = _my_group(layout.language_groups, rank, "language")
    vision_group = _my_group([layout.vision_ranks], rank, "vision")
    tied = plan.model.language.tied_embeddings
    embedding = _my_group(layout.embedding_groups if tied else [], rank, "embedding")
    shards = shard_groups(layout, rank, device, tp_group, GROUP_TIMEOUT, traffic)
    tp = alone
    if tp_group is not None:
        sharded = shards.get("language")
        mesh = sharded.grid["tp"] if sharded else DeviceMesh.from_group(tp_group, device.type, mesh_dim_names=("tp",))
        tp = TensorGroup(tp_group, place.tp, plan.parallel.tp, mesh, traffic, plan.parallel.sp)
    cp = ContextGroup()
    if cp_group is not None:
        p = plan.parallel
        cp = ContextGroup(cp_group, place.cp, p.cp, p.cp_mode, p.cp_scope, traffic)
    reductions = {m: vision_group if beside_encoder(plan, m) else language_group for m in MODULES}
    return Mesh(
        layout, place, device, control, tp, cp, reductions, embedding,
        Link(forward, rank, device, traffic, forward_down),
        Link(backward, rank, device, traffic, backward_down), traffic, shards,
        _token_links(layout, rank, device, traffic), store or dist.distributed_c10d._get_default_store(),
    )  # fmt: skip


def _token_links(layout: Layout, rank: int, device: torch.device, traffic: Traffic) -> tuple[Link, Link] | None:
    """Links for image tokens alone where ranks of the pipeline encode, on CUDA.

    NCCL runs the transfers of one pair of ranks in the order in which they were issued, and such ranks send tokens to
    each other and against the direction of activations. Ranks of the encoder's own only send forward; on CPU tags tell
    messages apart and sends never wait.
    """
    if device.type != "cuda" or layout.first:
        return None
    everyone = [place.rank for place in layout.places]
    up, down, grads_up, grads_down = (
        _my_group([everyone], rank, what) for what in ("tokens", "tokens down", "token grads", "token grads down")
    )
    return Link(up, rank, device, traffic, down), Link(grads_up, rank, device, traffic, grads_down)


def close_mesh(mesh: Mesh) -> None:
    """End the groups of this rank, and before them what works with them."""
    while mesh.closing:
        mesh.closing.pop()()
    for link in mesh.links:
        link.drop()
    if dist.is_initialized():
        dist.destroy_process_group()
