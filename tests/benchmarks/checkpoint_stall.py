"""How long a checkpoint holds a run up, written in the background against written while the run waits, and what the
writing does to the steps meanwhile.

One session of the trainer in warm ranks; each round saves once each way and takes some steps after each save and some
undisturbed, in turns, so that whatever else the machine does hits all alike. A stall is the time from the boundary
until the next step may begin, on the rank that is held up longest.

    python tests/benchmarks/checkpoint_stall.py [PLAN] [--rounds 12] [--steps 3] [--hidden 384] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

MOST_STEPS = 1_000_000
WARM_SAVES = 2
"""Saves of each kind before anything is timed: memory for the copy, caches, what is frozen."""


def follow(rank, world, host, port, run_dir, rounds, steps):
    """Seconds by kind: stalls of both kinds, the writing, and steps while it goes on, after it and undisturbed."""
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
    plan = Plan.load(paths.plan)
    mesh = build_mesh(plan, plan.layout(), rank, dist.TCPStore(host, port, is_master=False), torch.device("cpu"))
    listener = Listener(paths, rank, 1, Connections())
    made = Session(plan, paths, mesh, build(plan, mesh), Watch(telemetry=False), listener)
    found: dict[str, list[float]] = {"asynchronous": [], "synchronous": [], "writing": [], "meanwhile": [], "plain": []}

    def timed(kind, action):
        made.channel.gather(None)
        began = time.perf_counter()
        action()
        found[kind].append(max(made.channel.gather(time.perf_counter() - began)))

    def step():
        made.step()
        made.apply_commands()

    def save(wait):
        made.saves.save("", periodic=True, wait=wait)

    try:
        made.start(None)
        for number in range(rounds + WARM_SAVES):
            if number == WARM_SAVES:
                for values in found.values():
                    values.clear()
            step()
            began = time.perf_counter()
            timed("asynchronous", lambda: save(False))
            while not all(made.channel.gather(made.saves.idle)):
                timed("meanwhile", step)
            made.saves.finish()
            found["writing"].append(time.perf_counter() - began)
            for _ in range(steps):
                timed("plain", step)
            timed("synchronous", lambda: save(True))
        return found | {"bytes": sum(p.stat().st_size for p in paths.checkpoints.glob("step-*/*")) / made_count(paths)}
    finally:
        made.close()
        listener.close()
        close_mesh(mesh)


def made_count(paths):
    """Checkpoints in a run's folder."""
    return max(1, len(list(paths.checkpoints.glob("step-*"))))


def measure(plan, rounds, steps) -> dict[str, Any]:
    """Medians, and their ratios, for a plan of at least two ranks."""
    from mmlab.cluster.pool import RankPool
    from mmlab.messages.runs import create_run

    own = {
        "train.steps": MOST_STEPS,
        "checkpoint.every_steps": 0,
        "checkpoint.at_end": False,
        "checkpoint.keep_last": 2,
    }
    plan = plan.with_(own)
    with tempfile.TemporaryDirectory(prefix="mmlab-stall-") as folder:
        paths = create_run(Path(folder), "stall", plan.dumps(), plan.world_size, MOST_STEPS, generation=1)
        with RankPool(plan.world_size) as pool:
            found = pool.run("checkpoint_stall:follow", str(paths.root), rounds, steps, timeout=3600)[0]
    medians = {kind: statistics.median(values) for kind, values in found.items() if kind != "bytes" and values}
    return {
        "plan": plan.name, "ranks": plan.world_size, "megabytes": found["bytes"] / 1e6, "rounds": rounds,
        "stall_ratio": medians["asynchronous"] / medians["synchronous"],
        "step_ratio": medians["meanwhile"] / medians["plain"] if "meanwhile" in medians else None,
        "steps_meanwhile": len(found["meanwhile"]) / rounds, "medians": medians, "seconds": found,
    }  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", nargs="?", default="laptop", help="a plan's TOML file or a preset's name")
    parser.add_argument("--rounds", type=int, default=12, help="saves of each kind")
    parser.add_argument("--steps", type=int, default=3, help="undisturbed steps of a round")
    parser.add_argument("--hidden", type=int, default=384, help="width of the language model")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    from mmlab.plan import Plan

    plan = Plan.load(arguments.plan).with_(f"model.language.hidden={arguments.hidden}")
    found = measure(plan, arguments.rounds, arguments.steps)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    medians, ratio = found["medians"], found["step_ratio"]
    background, waited = 1e3 * medians["asynchronous"], 1e3 * medians["synchronous"]
    print(f"{found['plan']}, {found['ranks']} ranks, checkpoints of {found['megabytes']:.1f} MB")
    print(f"stall in the background {background:.1f} ms, waited for {waited:.1f} ms ({found['rounds']} rounds)")
    print(f"ratio of medians        {found['stall_ratio']:.3f}")
    if ratio is not None:
        print(f"steps meanwhile         {ratio:.2f} times an undisturbed one, {found['steps_meanwhile']:.1f} a save")


if __name__ == "__main__":
    main()
