"""`mmlab verify`: starts the plan and the plain reference, and judges the difference."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mmlab.cluster.pool import RankPool, borrowed
from mmlab.plan import Plan, check_platform
from mmlab.plan.compression import GROUPS
from mmlab.plan.schema import MODULES

FLOAT64_BOUND = 1e-9
"""Largest relative difference of any tensor in float64, over three optimizer steps."""
FP32_BOUND = 1e-5
"""Largest relative difference of loss and gradients at step 1 in fp32."""
LOW_PRECISION_FACTOR = 1.5
"""bf16: at most this times the error that plain bf16 has against float64."""
TIMEOUT = 900.0


def in_precision(plan: Plan, precision: str | None) -> Plan:
    """The plan as verify runs it: no warm-up, on CPU, gradients as they are (compressed ones differ by design), and
    `precision` (None: its own) in every module."""
    changes: dict[str, Any] = {f"train.{m}.warmup_steps": 0 for m in MODULES} | {"cluster.device": "cpu"}
    changes |= {f"communication.{side}.compressor": "none" for side in GROUPS}
    if precision is not None:
        changes |= {f"precision.{m}": precision for m in MODULES}
    return plan.with_(changes)


def left_off(plan: Plan) -> dict[str, str]:
    """The compressors that a plan has and verify runs without, by group."""
    found = {side: getattr(plan.communication, side).compressor for side in GROUPS}
    return {side: compressor for side, compressor in found.items() if compressor != "none"}


def verify(
    plan: Plan, steps: int = 3, progress: Callable[[str], None] | None = None, pool: RankPool | None = None
) -> dict[str, Any]:
    """Run the plan and one process from the same seed and data and compare every gradient and weight.

    Float64 for `steps` optimizer steps, then step 1 in the plan's own precision. `pool` reuses warm ranks. Returns
    max_rel_loss, max_rel_grad, max_rel_param, worst (names), own_precision, ok, losses, world_size, plan, seconds, and
    compressors_off (those that the plan has and the comparison runs without).
    PlanError when the plan has problems; MmlabError with what is wrong with its data or weights; RankError when a rank
    fails otherwise.
    """
    check_platform()
    plan.check().raise_if_any()
    began = time.monotonic()
    say = progress or (lambda text: None)
    with borrowed(plan.world_size, pool) as own, tempfile.TemporaryDirectory(prefix="mmlab-verify-") as folder:
        found = _verify(plan, steps, say, own, Path(folder))
    about = {"world_size": plan.world_size, "plan": plan.dumps(), "compressors_off": left_off(plan)}
    return found | about | {"seconds": round(time.monotonic() - began, 3)}


def _verify(plan: Plan, steps: int, say: Callable[[str], None], pool: RankPool, folder: Path) -> dict[str, Any]:
    def run(kind: str, *args: Any, ranks: int = 1) -> Any:
        return pool.run(f"mmlab.train.verify:{kind}", *args, ranks=ranks, timeout=TIMEOUT)[0]

    exact, own = folder / "float64", folder / "own"
    exact.mkdir()
    own.mkdir()
    plan = plan.with_("data.backend=pillow")  # the process that it is compared with decodes with nothing else
    in_float64 = in_precision(plan, "fp64").dumps()
    in_own = in_precision(plan, None).dumps()
    say(f"float64, {steps} steps on {plan.world_size} ranks")
    run("run_ranks", in_float64, steps, str(exact), ranks=plan.world_size)
    say(f"float64, {steps} steps on one process")
    run("run_reference", in_float64, steps, str(exact))
    result = run("compare", str(exact), str(exact))
    say("step 1 in the plan's own precision")
    run("run_ranks", in_own, 1, str(own), ranks=plan.world_size)
    run("run_reference", in_own, 1, str(own))
    own_precision = _own_precision(plan, run, exact, own)
    bounds = max(result["loss"], result["grad"], result["param"]) <= FLOAT64_BOUND
    return {
        "max_rel_loss": result["loss"], "max_rel_grad": result["grad"], "max_rel_param": result["param"],
        "worst": {"grad": result["grad_at"], "param": result["param_at"]},
        "losses": result["losses"], "plain_losses": result["plain_losses"],
        "own_precision": own_precision, "ok": bool(bounds and own_precision["ok"]),
    }  # fmt: skip


def _own_precision(plan: Plan, run: Callable[..., Any], exact: Path, own: Path) -> dict[str, Any]:
    """Step 1 in the plan's precision: against plain fp32, or (bf16) against plain bf16's own error from float64."""
    formats = {plan.precision.vision, plan.precision.projector, plan.precision.language}
    if formats & {"bf16", "fp16"}:
        error = run("compare", str(own), str(exact))
        plain = run("compare_plain", str(own), str(exact))
        ok = error["grad"] <= LOW_PRECISION_FACTOR * plain["grad"]
        return {"loss": error["loss"], "grad": error["grad"], "plain_grad": plain["grad"], "ok": ok}
    error = run("compare", str(own), str(own))
    return {"loss": error["loss"], "grad": error["grad"], "ok": max(error["loss"], error["grad"]) <= FP32_BOUND}
