"""Sharding applied to the parts of the model that a rank holds, module by module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from mmlab.models.build import PartModel
from mmlab.models.decoder import DecoderStage
from mmlab.parallel.sharding import Sharded, ShardGroup
from mmlab.plan.schema import MODULES, Plan


def shard_part(plan: Plan, part: PartModel, shards: Mapping[str, ShardGroup]) -> dict[str, Sharded]:
    """Put the modules that zero2 and zero3 share out under FSDP2; its hooks gather what a forward needs.

    Frozen modules must have been frozen before. zero1 leaves the model as it is.
    """
    if plan.parallel.sharding not in ("zero2", "zero3"):
        return {}
    found = {}
    for name in MODULES:
        module = getattr(part, name)
        if module is None or name not in shards:
            continue
        layers = getattr(plan.sharding, name) == "layer"
        chains: Sequence[Sequence[nn.Module]] = module.chains() if layers else ()
        if isinstance(module, DecoderStage):
            module.always_grad = True
        keep, each = plan.parallel.sharding == "zero2", plan.sharding.reduce == "microbatch"
        found[name] = Sharded(module, chains, shards[name], keep=keep, each=each)
    return found
