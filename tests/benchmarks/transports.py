"""Whole training steps over shared memory against the same steps over gloo.

Both sides are the trainer's own sessions in the same warm ranks, made anew in turn for each block of steps, so that
whatever else the machine does hits both. A number is the median of the step times of rank 0.

    python tests/benchmarks/transports.py [PLAN ...] [--rounds 6] [--steps 5] [--json FILE]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import bench_report

SIDES = ("shm", "gloo")
WARM_STEPS = 2
"""Steps of each block before anything is timed."""


def block(rank, world, host, port, run_dir, side, steps):
    """Seconds of each step over one transport, and what the groups say they use."""
    import torch
    import torch.distributed as dist

    from mmlab.messages import RunPaths
    from mmlab.parallel.abort import Connections
    from mmlab.parallel.mesh import build_mesh, close_mesh
    from mmlab.parallel.watch import Watch
    from mmlab.plan import Plan
    from mmlab.train.build import build
    from mmlab.train.control import Listener
    from mmlab.train.session import Session

    paths = RunPaths(Path(run_dir))
    plan = Plan.load(paths.plan).with_({"cluster.collectives": side})
    store = dist.TCPStore(host, port, is_master=False)
    mesh = build_mesh(plan, plan.layout(), rank, store, torch.device("cpu"))
    listener = Listener(paths, rank, 1, Connections())
    session = Session(plan, paths, mesh, build(plan, mesh), Watch(), listener)
    try:
        session.start(None)
        seconds = []
        for number in range(WARM_STEPS + steps):
            began = time.perf_counter()
            session.step()
            session.apply_commands()
            if number >= WARM_STEPS:
                seconds.append(time.perf_counter() - began)
        return seconds
    finally:
        session.close()
        listener.close()
        close_mesh(mesh)


def measure(plan, rounds, steps) -> dict[str, Any]:
    """Median seconds of a step on both sides, for a plan of at least two ranks."""
    from mmlab.cluster.pool import RankPool
    from mmlab.messages.runs import create_run

    plan = plan.with_({"train.steps": 1_000_000, "checkpoint.every_steps": 0, "checkpoint.at_end": False})
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory(prefix="mmlab-transports-") as folder, RankPool(plan.world_size) as pool:
        paths = create_run(Path(folder), "transports", plan.dumps(), plan.world_size, 1_000_000, generation=1)
        for number in range(rounds):
            for side in SIDES if number % 2 else reversed(SIDES):
                found[side] += pool.run("transports:block", str(paths.root), side, steps, timeout=600)[0]
    median = {side: statistics.median(found[side]) for side in SIDES}
    return {"plan": plan.name, "ranks": plan.world_size, **median, "ratio": median["gloo"] / median["shm"]}


def main() -> None:
    """Measure and print."""
    parser = bench_report.parser(__doc__)
    parser.add_argument("plans", nargs="*", default=["quickstart"], help="plans' TOML files or presets' names")
    parser.add_argument("--rounds", type=int, default=6, help="blocks of each side")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of a block")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="changes to every plan")
    given = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))

    from mmlab.plan import Plan

    print(bench_report.machine())
    print(f"{'plan':<24}{'ranks':>6}{'gloo ms':>10}{'shm ms':>10}{'gloo / shm':>12}")
    rows = []
    for name in given.plans:
        row = measure(Plan.load(name).with_(*given.set), given.rounds, given.steps)
        rows.append(row)
        gloo, ours = 1e3 * row["gloo"], 1e3 * row["shm"]
        print(f"{row['plan']:<24}{row['ranks']:>6}{gloo:>10.1f}{ours:>10.1f}{row['ratio']:>12.2f}")
    bench_report.keep(rows, given.json)


if __name__ == "__main__":
    main()
