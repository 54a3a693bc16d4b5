"""What runs the steps of a rank: the plan's engine."""

from __future__ import annotations

from mmlab.parallel.mesh import Mesh
from mmlab.parallel.watch import Watch
from mmlab.plan.schema import Plan
from mmlab.train.build import Built
from mmlab.train.deepspeed_step import DeepSpeedStep
from mmlab.train.step import HybridStep


def make_runner(plan: Plan, mesh: Mesh, built: Built, watch: Watch) -> HybridStep:
    """Steps as `parallel.engine` says: run from the op list alone, or with DeepSpeed between backward and update."""
    return DeepSpeedStep(plan, mesh, built, watch) if built.zero is not None else HybridStep(plan, mesh, built, watch)
