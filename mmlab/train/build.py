"""From a plan and a place to what a rank computes with: its part of the model, gradients, optimizer, ops."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from mmlab.models.build import Part, PartModel, build_part
from mmlab.models.layers import defer_weights
from mmlab.models.parallelize import shard_part
from mmlab.models.sharding import EMBED_TOKENS, partial_over_tp
from mmlab.models.weights import init_from
from mmlab.parallel.buckets import Trained, local_tensor, split_over_tp
from mmlab.parallel.deferred import WeightQueue
from mmlab.parallel.gradients import Reducer
from mmlab.parallel.mesh import Mesh
from mmlab.parallel.sharding import Sharded
from mmlab.plan.holders import beside_encoder
from mmlab.plan.layout import Layout, Place
from mmlab.plan.schedule import Op, build_schedule
from mmlab.plan.schema import MODULES, GroupCommunication, Plan
from mmlab.train.deepspeed_build import ZeroModel
from mmlab.train.onebit import OnebitAdam
from mmlab.train.optim import Optimizer
from mmlab.train.precision import master_dtype


def part_of(plan: Plan, layout: Layout, place: Place) -> Part:
    """Which part of the model a rank holds."""
    beside, encodes = plan.parallel.projector == "vision", place.vision >= 0
    if place.role == "vision":
        return Part(vision=True, projector=beside)
    first, last = layout.embeds(place), layout.heads(place)
    chunks = tuple(layout.layers_of(place.pp))
    return Part(vision=encodes, projector=encodes if beside else first, chunks=chunks, embed=first, head=last)


@dataclass
class Built:
    """One rank's part of a run, made anew for each generation."""

    part: PartModel
    trained: list[Trained]
    reducer: Reducer
    optimizer: Optimizer
    ops: list[Op]
    sharded: dict[str, Sharded]
    weights: WeightQueue | None
    """Puts off weight gradients, where the schedule splits backward."""
    zero: ZeroModel | None = None
    """With engine = "deepspeed": the modules that it holds. The other fields are then about the rest alone, but `part`
    is the whole model."""


def is_tied_copy(plan: Plan, place: Place, name: str) -> bool:
    """Whether a parameter is the last stage's copy of the tied embedding (the first stage's is the one that counts)."""
    return name == EMBED_TOKENS and plan.model.language.tied_embeddings and place.role == "language" and place.pp > 0


def _trained(plan: Plan, mesh: Mesh, part: PartModel, sharded: Collection[str]) -> list[Trained]:
    place = mesh.place
    trained = []
    for name, param in part.named_parameters():
        module = name.split(".", 1)[0]
        if not param.requires_grad:
            continue
        split = split_over_tp(param)
        # Each rank has rows of its own of what is sharded; replicas over tp are equal.
        alone = (module in sharded or (place.dp == 0 and place.cp == 0)) and (split or place.tp == 0)
        first = module in sharded or place.vision == 0
        counted = first if beside_encoder(plan, module) else alone and not is_tied_copy(plan, place, name)
        # With sequence parallelism a replicated parameter (norms) sees its rank's share of the tokens alone.
        shares = mesh.tp.sequence and module == "language" and not split
        partial = mesh.tp.size > 1 and (shares or partial_over_tp(name))
        once = beside_encoder(plan, module) or split or place.tp == 0
        trained.append(Trained(name, param, local_tensor(param), module, counted, partial, module in sharded, once))
    return trained


def _deferred(plan: Plan, part: PartModel) -> WeightQueue | None:
    """The queue of a stage rank whose schedule splits backward, with all linear layers of its chunks told of it."""
    if not plan.parallel.splits_backward or part.language is None:
        return None
    queue = WeightQueue()
    defer_weights(part.language, queue)
    if part.projector is not None and plan.parallel.projector == "first_stage":
        defer_weights(part.projector, queue)
    return queue


def communication(plan: Plan) -> dict[str, GroupCommunication]:
    """How each module's gradients are reduced; the projector goes with the side that computes it.

    1-bit Adam compresses first moments alone: until it reduces those, there is no compression.
    """
    dense = plan.train.freeze_step if plan.train.optimizer == "onebit_adam" else 0
    vision, language = (
        side.model_copy(update={"warmup_steps": max(side.warmup_steps, dense)})
        for side in (plan.communication.vision, plan.communication.language)
    )
    return {m: vision if beside_encoder(plan, m) else language for m in MODULES}


def _bucket_bytes(plan: Plan) -> dict[str, float]:
    """Largest bucket of each module."""
    return {m: 1e6 * settings.bucket_mb for m, settings in communication(plan).items()}


def _optimizer(plan: Plan, mesh: Mesh, trained: list[Trained]) -> Optimizer:
    if plan.train.optimizer == "adamw":
        return Optimizer(plan, trained, mesh.shards)
    return OnebitAdam(plan, trained, {t.name for t in trained if is_tied_copy(plan, mesh.place, t.name)})


def build(plan: Plan, mesh: Mesh) -> Built:
    """Make this rank's part; the order of what is applied is the order of these lines."""
    if plan.parallel.engine == "deepspeed":
        return _build_deepspeed(plan, mesh)
    part = build_part(plan, part_of(plan, mesh.layout, mesh.place), mesh.tp, master_dtype(plan), mesh.device)
    init_from(part, plan)
    weights = _deferred(plan, part)
    sharded = shard_part(plan, part, mesh.shards)
    trained = _trained(plan, mesh, part, sharded)
    undoable = plan.precision.scales_loss
    sums = {name: module.reduce(trained, undoable) for name, module in sharded.items()}
    reducer = Reducer(trained, mesh.reductions, _bucket_bytes(plan), mesh.tp, mesh.traffic, undoable, sums)
    optimizer = _optimizer(plan, mesh, trained)
    return Built(part, trained, reducer, optimizer, build_schedule(plan).ops[mesh.place.rank], sharded, weights)


def _build_deepspeed(plan: Plan, mesh: Mesh) -> Built:
    """The same under DeepSpeed, which holds some modules or all; what it does not hold is mmlab's own."""
    zero = ZeroModel(plan, mesh)
    held = {*zero.engine.params, *zero.engine.frozen}
    trained = [t for t in _trained(plan, mesh, zero.part, ()) if t.name not in held]
    reducer = Reducer(trained, mesh.reductions, _bucket_bytes(plan), mesh.tp, mesh.traffic)
    kinds = ("forward", "backward", "reduce", "norm", "update")  # encoding is part of the one forward
    ops = [op for op in build_schedule(plan).ops[mesh.place.rank] if op.kind in kinds]
    return Built(zero.part, trained, reducer, Optimizer(plan, trained), ops, {}, None, zero)
