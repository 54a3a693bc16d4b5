"""What a plan must satisfy: one small function a rule, each yielding problems with field, message and fix.

To add a rule, write a function that takes a plan and yields problems, and put it into RULES.
"""

from __future__ import annotations

from mmlab.plan.problems import Problem
from mmlab.plan.rules import (
    checkpoints,
    cluster,
    compression,
    data,
    deepspeed,
    encoder,
    general,
    layout,
    lora,
    model,
    onebit,
    pipeline,
    remote,
    sequence,
    sharding,
)
from mmlab.plan.rules.common import Rule, check_platform
from mmlab.plan.rules.engines import engine_count
from mmlab.plan.schema import Plan

__all__ = ["RULES", "check_platform", "find_problems"]

RULES: tuple[Rule, ...] = (
    general.name,
    layout.vision_group,
    layout.vision_batch,
    encoder.encoder_batch,
    encoder.encoder_ahead,
    model.image_patches,
    model.vision_heads,
    model.language_heads,
    layout.tensor_split,
    pipeline.chunks,
    pipeline.stages,
    pipeline.split,
    pipeline.interleaved_microbatches,
    pipeline.sharded_schedule,
    general.batch,
    general.sequence,
    layout.tensor_group_on_node,
    layout.encoder_beside_first_stage,
    sequence.sequence_parallel,
    sequence.ulysses_heads,
    sequence.image_scope,
    general.something_trains,
    general.lanes,
    general.mixture,
    data.tiles,
    data.backend,
    data.buckets,
    data.token_budget,
    remote.addresses,
    checkpoints.location,
    cluster.shared_memory,
    cluster.anchors,
    lora.lora_targets,
    lora.lora_rank,
    lora.lora_frozen,
    sharding.something_is_shared,
    sharding.several_holders,
    compression.whole_matrices,
    compression.shared_residuals,
    onebit.clipping,
    onebit.whole_moments,
    onebit.freeze,
    deepspeed.layout,
    deepspeed.sharding,
    deepspeed.precision,
    deepspeed.offload,
)
"""All rules, in the order in which their problems are shown."""


def find_problems(plan: Plan, engines: int | None = None) -> list[Problem]:
    """All problems of a plan; with `engines`, also whether that many are enough."""
    problems = [problem for rule in RULES for problem in rule(plan)]
    return problems + (list(engine_count(plan, engines)) if engines is not None else [])
