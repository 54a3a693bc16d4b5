"""mmlab's own zero1, zero2 and zero3 against DeepSpeed's, on the same model and data: seconds of a step.

Both sides are runs of the same warm ranks, which take turns, so that whatever else the machine does hits both. A number
is the median over the steps of all rounds; of each step the slowest rank counts. Both reduce gradients after each
microbatch or once a step alike (`sharding.reduce`).

    python tests/benchmarks/deepspeed_steps.py [--dp 2] [--steps 12] [--rounds 4] [--json FILE] [key=value ...]
"""

from __future__ import annotations

import statistics
from typing import Any

import bench_report
from sharding import MODEL

STAGES = ("zero1", "zero2", "zero3")


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
    parser = bench_report.parser(__doc__)
    parser.add_argument("changes", nargs="*")
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=4)
    given = parser.parse_args()
    rows = measure(given.dp, given.steps, given.rounds, tuple(given.changes))
    changes = "".join(f" {change}" for change in given.changes)
    print(f"laptop, {' '.join(MODEL[:4])}, dp {given.dp}{changes}; {bench_report.machine()}")
    print(table(rows))
    bench_report.keep(rows, given.json)


if __name__ == "__main__":
    main()
