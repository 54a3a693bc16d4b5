"""mmlab's own zero1, zero2 and zero3 against DeepSpeed's, on the same model and data: seconds of a step.

Both sides are runs of the same warm ranks, which take turns, so that whatever else the machine does hits both. A number
is the median over the steps of all rounds; of each step the slowest rank counts. Both reduce gradients after each
microbatch or once a step alike (`sharding.reduce`).

    python tests/benchmarks/deepspeed_steps.py [--dp 2] [--steps 12] [--rounds 4] [--json FILE] [key=value ...]
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from collectives import machine

STAGES = ("zero1", "zero2", "zero3")
MODEL = (
    "model.language.hidden=256", "model.language.layers=6", "model.language.heads=8", "model.language.kv_heads=8",
    "parallel.vision=first_stage", "parallel.vision_dp=0", "parallel.pp=1", "parallel.microbatches=1",
    "data.global_batch=16", "data.seq_len=64", "data.held_out=",
)  # fmt: skip
"""That of `sharding.py`, so that the tables can be read together."""


def measure(dp: int, steps: int, rounds: int, changes: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """One row for each stage: medians in milliseconds of "native" and "deepspeed", "ratio" (deepspeed / native), and
    "loss": how far the last losses of both sides are apart, relatively."""
    from mmlab.cluster.pool import RankPool
    from mmlab.plan import Plan

    rows = []
    with RankPool(dp) as pool:
        for stage in STAGES:
            seconds: dict[str, list[float]] = {"native": [], "deepspeed": []}
            last = {}
            for _ in range(rounds):
                for engine, found in seconds.items():
                    asked = (f"parallel.dp={dp}", f"parallel.sharding={stage}", f"parallel.engine={engine}")
                    plan = Plan.load("laptop").with_(*MODEL, *asked, *changes)
                    plan.check().raise_if_any()
                    ranks = pool.run("mmlab.train.bench:run_steps", plan.dumps(), steps, ranks=dp, timeout=900)
                    found += [max(r["seconds"][step] for r in ranks) for step in range(steps)]
                    last[engine] = ranks[0]["losses"][-1]
            median = {engine: 1e3 * statistics.median(found) for engine, found in seconds.items()}
            ratio = median["deepspeed"] / median["native"]
            apart = abs(last["deepspeed"] - last["native"]) / last["native"]
            rows.append({"stage": stage, **median, "ratio": ratio, "loss": apart})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    lines = [f"{'':<8}{'native ms':>12}{'deepspeed ms':>14}{'deepspeed / native':>20}{'losses apart':>14}"]
    for row in rows:
        lines.append(
            f"{row['stage']:<8}{row['native']:>12.1f}{row['deepspeed']:>14.1f}{row['ratio']:>20.2f}{row['loss']:>14.1e}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("changes", nargs="*")
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = measure(given.dp, given.steps, given.rounds, tuple(given.changes))
    print(
        f"laptop, {' '.join(MODEL[:4])}, dp {given.dp}{''.join(' ' + change for change in given.changes)}; {machine()}"
    )
    print(table(rows))
    if given.json:
        given.json.write_text(json.dumps({"machine": machine(), "rows": rows}))


if __name__ == "__main__":
    main()
