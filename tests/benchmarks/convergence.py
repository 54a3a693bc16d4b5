"""Loss after equal steps with each compressor against dense gradients, on the emoji task.

The quickstart plan as plain data parallelism over two ranks (`first_stage`, dp 2), so that every gradient of all three
modules goes through the reduction: the same weights, samples and learning rates for all sides. Biased compressors begin
after a fifth of the steps, as in 1-bit Adam's paper (23,000 of 118,000 for BERT-Large, section 7.1). A side's losses
are the mean of the last tenth of its steps, and the held-out loss at its end; nothing here depends on the clock.

    python tests/benchmarks/convergence.py [PLAN] [key=value ...] [--steps 600] [--seeds 0 1] [--sides NAME ...]
"""

from __future__ import annotations

import math
from typing import Any

from bench_report import keep, machine, parser

TIMEOUT = 1800
"""Seconds that one training may take."""
BASE = (
    "parallel.vision=first_stage",
    "parallel.vision_dp=0",
    "parallel.dp=2",
    "parallel.tp=1",
    "parallel.pp=1",
    "parallel.microbatches=1",
    "train.eval_samples=320",
)
"""Overrides of every side: plain data parallelism."""


def compressed(*settings: str) -> tuple[str, ...]:
    """The settings for both groups."""
    return tuple(f"communication.{group}.{setting}" for group in ("vision", "language") for setting in settings)


def sides(steps: int) -> dict[str, tuple[str, ...]]:
    """Overrides of each side of a comparison over so many steps; the first is what the others are compared with."""
    warm = f"warmup_steps={steps // 5}"
    topk, powersgd = ("compressor=topk", "ratio=0.01"), ("compressor=powersgd", "rank=4")
    frozen = (
        *("train.optimizer=onebit_adam", "train.clip_norm=0", f"train.freeze_step={steps // 5}"),
        *(f"train.{module}.beta2=0.999" for module in ("vision", "projector", "language")),  # the paper's
    )
    return {
        "none": (),
        "fp16": compressed("compressor=fp16"),
        "bf16": compressed("compressor=bf16"),
        "int8": compressed("compressor=int8", warm),
        "powersgd rank 4": compressed(*powersgd, warm),
        "onebit": compressed("compressor=onebit", warm),
        "topk 1 %": compressed(*topk, warm),
        "topk 1 %, no error feedback": compressed(*topk, "error_feedback=false", warm),
        "1-bit Adam, none": frozen,
        "1-bit Adam, onebit": (*frozen, *compressed("compressor=onebit")),
        "1-bit Adam, powersgd rank 4": (*frozen, *compressed(*powersgd)),
        "1-bit Adam, topk 1 %": (*frozen, *compressed(*topk)),
    }


def train(rank: int, world: int, host: str, port: int, plan_text: str) -> dict[str, Any]:
    """A rank of one training: "losses" of all steps, the "held_out" loss after them, "bytes" that all ranks hand to
    reductions in the last one. Losses are infinite from where a training has diverged."""
    import torch
    import torch.distributed as dist

    from mmlab.data.pipeline import DataSource
    from mmlab.parallel.mesh import build_mesh, close_mesh
    from mmlab.parallel.watch import Watch
    from mmlab.plan import Plan
    from mmlab.plan.schema import MODULES
    from mmlab.train.build import build
    from mmlab.train.evaluate import Evaluator
    from mmlab.train.feed import Feed
    from mmlab.train.step import HybridStep, NotFinite, Ride

    plan = Plan.loads(plan_text)
    mesh = build_mesh(plan, plan.layout(), rank, dist.TCPStore(host, port, is_master=False), torch.device("cpu"))
    feed = Feed(plan, mesh, DataSource(plan))
    runner = HybridStep(plan, mesh, build(plan, mesh), Watch())
    losses, held_out = [], math.inf
    try:
        feed.reset(feed.cursors, 0)
        for step in range(1, plan.train.steps + 1):
            ride = Ride(next_bad=feed.next_bad, next_size=plan.data.global_batch)
            result = runner.train(plan, step, feed.batch(), ride)
            feed.agree(result.next_bad)
            losses.append(result.loss)
        evaluator = Evaluator(runner, plan, mesh)
        held_out = evaluator.losses(plan, plan.train.steps)["loss"]
        evaluator.close()
    except NotFinite:  # of all ranks in the same step
        losses.append(math.inf)
    finally:
        runner.close()
        feed.close()
        close_mesh(mesh)
    traffic = result.reported.traffic
    return {"losses": losses, "held_out": held_out, "bytes": sum(sum(traffic.get(module, [])) for module in MODULES)}


def last_tenth(losses: list[float]) -> float:
    """The mean of the last tenth of the steps."""
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def measure(plan, compared: dict[str, tuple[str, ...]], seeds: list[int]) -> list[dict[str, Any]]:
    """One row a side: the losses of each seed, their means of the last tenth, each against the first side's, bytes."""
    from mmlab.cluster.pool import RankPool

    plans = {name: plan.with_(*overrides) for name, overrides in compared.items()}
    for made in plans.values():
        made.check().raise_if_any()
    rows: list[dict[str, Any]] = []
    with RankPool(plan.world_size) as pool:
        for name, made in plans.items():
            found = []
            for seed in seeds:
                seeded = made.with_(f"train.seed={seed}", f"data.seed={seed}")
                found.append(pool.run("convergence:train", seeded.dumps(), timeout=TIMEOUT)[0])
            final = [last_tenth(result["losses"]) for result in found]
            held_out = [result["held_out"] for result in found]
            first = rows[0] if rows else {"final": final, "held_out": held_out}
            rows.append(
                {
                    "side": name,
                    "final": final,
                    "against_first": [mine / other for mine, other in zip(final, first["final"], strict=True)],
                    "held_out": held_out,
                    "held_out_against": [a / b for a, b in zip(held_out, first["held_out"], strict=True)],
                    "bytes": found[0]["bytes"],
                    "losses": [result["losses"] for result in found],
                }
            )
            print(line(rows[-1], rows[0]), flush=True)
    return rows


def line(row: dict[str, Any], first: dict[str, Any]) -> str:
    """A row as printed."""
    parts = []
    for value, against in (("final", "against_first"), ("held_out", "held_out_against")):
        pairs = zip(row[value], row[against], strict=True)
        parts.append("  ".join(f"{loss:.4f} ({share:5.3f})" for loss, share in pairs))
    fewer = first["bytes"] / row["bytes"]
    return f"{row['side']:30} {parts[0]}   held out {parts[1]}   {row['bytes'] / 1e6:7.3f} MB, {fewer:5.1f} x fewer"


def main() -> None:
    """Measure and print."""
    found = parser(__doc__)
    found.add_argument("plan", nargs="?", default="quickstart", help="a plan's TOML file or a preset's name")
    found.add_argument("changes", nargs="*", help="overrides of every side, such as train.clip_norm=0")
    found.add_argument("--steps", type=int, default=600, help="steps of each training")
    found.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="seeds of weights and order")
    found.add_argument("--sides", nargs="+", choices=list(sides(5)), help="what to train; the first is the baseline")
    arguments = found.parse_args()
    from mmlab.plan import Plan

    plan = Plan.load(arguments.plan).with_(*BASE, f"train.steps={arguments.steps}", *arguments.changes)
    known = sides(arguments.steps)
    print(f"{plan.name}, dp 2, {arguments.steps} steps; loss of the last tenth (against the first side)  [{machine()}]")
    keep(measure(plan, {name: known[name] for name in arguments.sides or known}, arguments.seeds), arguments.json)


if __name__ == "__main__":
    main()
