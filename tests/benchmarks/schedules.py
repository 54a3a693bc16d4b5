"""Pipeline schedules: the bubble of sleeping stages against the op list, step and bubble against torch's pipelining.

`sleep`: every pass of the op list sleeps, on real ranks with real transfers; the measured bubble stands beside the one
that the same list predicts. `peers`: the decoder (text alone, no optimizer) under our schedules on gloo and on shared
memory, and under torch.distributed.pipelining's on gloo: same weights, same tokens, one process and one thread a rank,
sides in turn in the same ranks; a number is the median of the rounds (processor time says more where others use the
machine too). torch has no ZB-H1: `zb_h1` stands beside its ScheduleInterleavedZeroBubble with one stage a rank.

    python tests/benchmarks/schedules.py [--part sleep peers] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

from mmlab.cluster.pool import RankPool
from mmlab.plan import Op, Plan, Schedule, bubble, simulate
from mmlab.plan.ops import Timed

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb_h1", "zb_v")
PASS_SECONDS = 0.06
"""A pass of a rank's whole share that sleeps; with F = B = W a whole backward takes two."""
TIMEOUT = 300.0


def make_plan(schedule: str, pp: int, m: int, **model: int) -> Plan:
    """A plan of `pp` ranks, text alone in what these benchmarks run of it."""
    changes: dict[str, Any] = {
        "parallel.vision": "first_stage", "parallel.vision_dp": 0, "parallel.pp": pp, "parallel.schedule": schedule,
        "parallel.microbatches": m, "data.global_batch": m, "model.language.layers": 2 * pp,
        "model.language.tied_embeddings": False, "cluster.collectives": "shm",
    }  # fmt: skip
    plan = Plan().with_(changes | {f"model.language.{name}": value for name, value in model.items()})
    plan.check().raise_if_any()
    return plan


def timeline(ranks: list[Any]) -> list[list[Timed]]:
    """Passes as ranks noted them, from the first one's start."""
    origin = min(start for busy in ranks for *_, start, _ in busy)
    return [
        [Timed(Op(kind, i, chunk=chunk), start - origin, end - origin) for kind, i, chunk, start, end in busy]
        for busy in ranks
    ]


# -- sleeping stages


def sleeping(
    pool: RankPool, schedule: str, pp: int, m: int, steps: int, seconds: float = PASS_SECONDS
) -> dict[str, Any]:
    """The bubble of sleeping stages (median of the steps) beside the predicted one."""
    plan = make_plan(schedule, pp, m)
    share = seconds / plan.parallel.chunks_per_rank
    costs = {"forward": share, "backward": 2 * share, "backward_input": share, "backward_weight": share}
    pool.grow(pp)
    found = pool.run("schedule_ranks:sleep", plan.dumps(), costs, steps, ranks=pp, timeout=TIMEOUT)
    measured = [bubble(timeline([rank[step] for rank in found])) for step in range(steps)]
    return {
        "schedule": schedule, "pp": pp, "m": m, "measured": statistics.median(measured),
        "predicted": predicted(plan, costs),
    }  # fmt: skip


def predicted(plan: Plan, costs: dict[str, float]) -> float:
    """The bubble of the pipeline's ops alone."""
    kinds = {*costs, "send_forward", "recv_forward", "send_backward", "recv_backward"}
    ops = [[op for op in each if op.kind in kinds] for each in plan.schedule().ops]
    return bubble(simulate(Schedule(plan, ops), plan, costs))


# -- against torch


def peers(pool: RankPool, schedule: str, pp: int, m: int, rounds: int, tokens: int, **model: int) -> dict[str, Any]:
    """Step time and bubble of each side; ratios are torch's median over ours."""
    plan = make_plan(schedule, pp, m, **model)
    pool.grow(pp)
    found = pool.run("schedule_ranks:compare", plan.dumps(), tokens, rounds, ranks=pp, timeout=TIMEOUT)
    row: dict[str, Any] = {"schedule": schedule, "pp": pp, "m": m, "error": max(each["error"] for each in found)}
    row["losses"] = {side: max(each["loss"][side] for each in found) for side in found[0]["loss"]}
    for side in found[0]["steps"]:
        steps = list(zip(*(each["steps"][side] for each in found), strict=True))
        row[side] = statistics.median(max(each[1] for each in step) - min(each[0] for each in step) for step in steps)
        row[f"{side}_cpu"] = statistics.median(sum(each[2] for each in step) for step in steps)
        row[f"{side}_bubble"] = statistics.median(bubble(timeline([busy for *_, busy in step])) for step in steps)
    return row | {"ratio_gloo": row["torch"] / row["gloo"], "ratio_shm": row["torch"] / row["shm"]}


# -- report


def sleep_table(rows: list[dict[str, Any]]) -> str:
    """Measured beside predicted."""
    lines = [f"{'schedule':<12}{'ranks':>6}{'m':>4}{'measured':>10}{'predicted':>10}{'difference':>11}"]
    for row in rows:
        gap = row["measured"] - row["predicted"]
        name = f"{row['schedule']:<12}{row['pp']:>6}{row['m']:>4}"
        lines.append(f"{name}{row['measured']:>10.3f}{row['predicted']:>10.3f}{gap:>11.3f}")
    return "\n".join(lines)


def peer_table(rows: list[dict[str, Any]]) -> str:
    """Milliseconds a step, and of processor time of all ranks together; bubbles; torch over ours."""
    names = ("torch", "gloo", "shm")
    head = "".join(f"{name:>9}{'cpu':>7}{'bubble':>8}" for name in names)
    lines = [f"{'schedule':<12}{'ranks':>6}{'m':>4}{head}{'t/gloo':>8}{'t/shm':>8}{'error':>9}"]
    for row in rows:
        cells = "".join(
            f"{1000 * row[name]:>9.0f}{1000 * row[f'{name}_cpu']:>7.0f}{row[f'{name}_bubble']:>8.3f}" for name in names
        )
        ratios = f"{row['ratio_gloo']:>8.2f}{row['ratio_shm']:>8.2f}{row['error']:>9.0e}"
        lines.append(f"{row['schedule']:<12}{row['pp']:>6}{row['m']:>4}{cells}{ratios}")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=("sleep", "peers"), default=["sleep", "peers"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=2, help="of `peers`: as many as there are cores")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    sys.path.append(str(Path(__file__).parent))
    model = {"hidden": given.hidden, "layers": given.layers}
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    found: dict[str, Any] = {}
    with RankPool(2) as pool:
        if "sleep" in given.part:
            cases = [(name, pp, m) for name in SCHEDULES for pp, m in ((2, 4), (4, 8))]
            found["sleep"] = [sleeping(pool, *case, steps=given.rounds) for case in cases]
            print(sleep_table(found["sleep"]), flush=True)
        if "peers" in given.part:
            settings = (given.ranks, given.microbatches, given.rounds, given.tokens)
            found["peers"] = [peers(pool, name, *settings, **model) for name in SCHEDULES]
            print(f"decoder: {model}, {given.tokens} tokens a microbatch; milliseconds a step")
            print(peer_table(found["peers"]))
    print(f"load {os.getloadavg()[0]:.1f}")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
