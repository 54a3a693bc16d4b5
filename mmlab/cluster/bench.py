"""`mmlab bench offload`: what each offload mode costs in steps a second and saves in device memory, on this machine."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from mmlab.cluster.pool import borrowed
from mmlab.plan import Plan, check_platform

MODES = ("none", "optimizer", "parameters", "nvme")
TIMEOUT = 3600.0


def cases(plan: Plan) -> list[tuple[str, Plan]]:
    """(mode, plan) of each measurement: the plan under DeepSpeed; modes that need ZeRO-3 with it, and then a further
    measurement of ZeRO-3 without offload to compare with."""
    base = plan.with_("parallel.engine=deepspeed", "offload.mode=none")
    found = [("none", base), ("optimizer", base.with_("offload.mode=optimizer"))]
    if base.parallel.sharding != "zero3":
        base = base.with_("parallel.sharding=zero3")
        found.append(("none", base))
    return found + [(mode, base.with_(f"offload.mode={mode}")) for mode in ("parameters", "nvme")]


ROUNDS = 2
"""How often the modes take turns: a machine that was busy for a while would otherwise have one mode pay for it."""


def bench_offload(plan: Plan, steps: int, say: Callable[[str], None] = lambda text: None) -> list[dict[str, Any]]:
    """One row for each mode: "mode", "sharding", "seconds" of each step, "steps_per_s" (median), "slower" (share lost
    against the same sharding without offload), "off_device" and "peak" (bytes, of the rank with most), "losses";
    "problem" where a mode cannot run here. PlanError when the plan itself cannot run under DeepSpeed; MmlabError with
    what else is at fault."""
    check_platform()
    rows: list[tuple[dict[str, Any], Plan]] = []
    for mode, case in cases(plan):
        problems = case.check()
        row: dict[str, Any] = {"mode": mode, "sharding": case.parallel.sharding, "seconds": []}
        if mode == "none":
            problems.raise_if_any()
        rows.append((row | ({"problem": problems[0].message} if problems else {}), case))
    measured = [(row, case) for row, case in rows if "problem" not in row]
    for number in range(ROUNDS):
        for row, case in measured:
            say(f"round {number + 1}: {row['sharding']}, offload {row['mode']}, {steps} steps")
            found = _run(case, steps)
            row["seconds"] += [max(result["seconds"][step] for result in found) for step in range(steps)]
            row |= {"losses": found[0]["losses"]}
            row |= {key: max(result[key] for result in found) for key in ("off_device", "peak")}
    for row, _ in measured:
        row["steps_per_s"] = 1.0 / statistics.median(row["seconds"])
        beside = next(r for r, _ in measured if r["mode"] == "none" and r["sharding"] == row["sharding"])
        row["slower"] = 1.0 - row["steps_per_s"] / (1.0 / statistics.median(beside["seconds"]))
    return [row for row, _ in rows]


def _run(case: Plan, steps: int) -> list[dict[str, Any]]:
    """What each rank measured, in new processes: peaks of memory are since their start."""
    with borrowed(case.world_size, threads=case.cluster.threads or 1) as pool:
        found: list[dict[str, Any]] = pool.run("mmlab.train.bench:run_steps", case.dumps(), steps, timeout=TIMEOUT)
    return found
