"""Steps per second of a plan with each placement of the encoder, and of a frozen encoder that works ahead or not.

Every side is a set of warm ranks of its own that holds the plan with other overrides; the sides take turns in short
blocks, in another order each round, so that whatever else the machine does hits all. Ranks of sides that wait are
blocked in a broadcast. The sides need different numbers of ranks on the same cores: this compares whole machines, as a
user does who has these cores and wonders how to lay the plan out.

    python tests/benchmarks/placements.py [PLAN] [--sides placements|ahead] [--rounds 15] [--steps 4] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

WARM_STEPS = 3
"""Steps of each side before anything is timed: allocators, caches, connections."""
POLL = 0.005
"""Seconds between looks of a waiting rank 0 for its next block."""
TIMEOUT = 3600
"""Seconds that a side may take for everything."""

MERGED, SPREAD = (
    ("parallel.vision=first_stage", "parallel.vision_dp=0"),
    (
        "parallel.vision=all_ranks",
        "parallel.vision_dp=0",
    ),
)
GATHER = "parallel.transfer=all_gather"
SIDES = {
    "placements": {
        "own_ranks": (),
        "own_ranks, all_gather": (GATHER,),
        "own_ranks, both microbatches at once": ("parallel.encoder_batch=2",),
        "first_stage": MERGED,
        "first_stage, all_gather": (*MERGED, GATHER),
        "all_ranks": SPREAD,
        "all_ranks, all_gather": (*SPREAD, GATHER),
    },
    "ahead": {
        "frozen": ("train.vision.frozen=true",),
        "frozen, 1 step ahead": ("train.vision.frozen=true", "parallel.encoder_ahead=1"),
        "frozen, 3 steps ahead": ("train.vision.frozen=true", "parallel.encoder_ahead=3"),
        "frozen, first_stage": ("train.vision.frozen=true", *MERGED),
        "frozen, all_ranks": ("train.vision.frozen=true", *SPREAD),
    },
}
"""Overrides of each side; the first is what the others are compared with."""


def serve(rank, world, host, port, plan_text, folder):
    """A rank of one side: trains as many steps as each new file `go-N` says, until one says 0."""
    import torch
    import torch.distributed as dist

    from mmlab.data.pipeline import DataSource
    from mmlab.parallel.mesh import build_mesh, close_mesh
    from mmlab.parallel.watch import Watch
    from mmlab.plan import Plan
    from mmlab.train.build import build
    from mmlab.train.control import Channel
    from mmlab.train.feed import Feed
    from mmlab.train.step import HybridStep, Ride

    plan, folder = Plan.loads(plan_text), Path(folder)
    store = dist.TCPStore(host, port, is_master=False) if world > 1 else None
    mesh = build_mesh(plan, plan.layout(), rank, store, torch.device("cpu"))
    feed = Feed(plan, mesh, DataSource(plan))
    runner, channel = HybridStep(plan, mesh, build(plan, mesh), Watch()), Channel(mesh)
    feed.reset(feed.cursors, 0)
    step, number = 0, 0
    try:
        while True:
            order = folder / f"go-{number}"
            while rank == 0 and not order.exists():
                time.sleep(POLL)
            steps = channel.share(int(order.read_text()) if rank == 0 else 0)
            if steps == 0:
                return
            began = time.perf_counter()
            for _ in range(steps):
                step += 1
                ride = Ride(next_bad=feed.next_bad, next_size=plan.data.global_batch)
                feed.agree(runner.train(plan, step, feed.batch(), ride).next_bad)
            if rank == 0:  # the step's own reduction has just brought all ranks together
                (folder / f"done-{number}.part").write_text(str(time.perf_counter() - began))
                (folder / f"done-{number}.part").rename(folder / f"done-{number}")
            number += 1
    finally:
        runner.close()
        feed.close()
        close_mesh(mesh)


class Side:
    """The ranks of one side, seen from the process that measures."""

    def __init__(self, plan, folder: Path) -> None:
        from mmlab.cluster.pool import RankPool

        folder.mkdir()
        self.folder, self.number, self.error = folder, 0, None
        self.pool = RankPool(plan.world_size)
        self.thread = threading.Thread(target=self._run, args=(plan.dumps(),), daemon=True)
        self.thread.start()

    def _run(self, text: str) -> None:
        try:
            self.pool.run("placements:serve", text, str(self.folder), timeout=TIMEOUT)
        except Exception as error:
            self.error = error

    def _order(self, steps: int) -> None:
        (self.folder / "order").write_text(str(steps))
        (self.folder / "order").rename(self.folder / f"go-{self.number}")

    def block(self, steps: int) -> float:
        """Seconds that a block of steps takes."""
        self._order(steps)
        done = self.folder / f"done-{self.number}"
        while not done.exists():
            if self.error is not None or not self.thread.is_alive():
                raise RuntimeError(f"a side ended: {self.error}")
            time.sleep(POLL)
        self.number += 1
        return float(done.read_text())

    def close(self) -> None:
        """End the ranks."""
        self._order(0)
        self.thread.join(30)
        self.pool.close()


def measure(plan, sides: dict[str, tuple[str, ...]], rounds: int, steps: int) -> dict[str, Any]:
    """Seconds of each block of each side, and what follows from them."""
    plans = {name: plan.with_({"train.steps": 1_000_000}, *overrides) for name, overrides in sides.items()}
    for made in plans.values():
        made.check().raise_if_any()
    draw, running = random.Random(0), {}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    with tempfile.TemporaryDirectory(prefix="mmlab-placements-") as folder:
        try:
            for number, (name, made) in enumerate(plans.items()):
                running[name] = Side(made, Path(folder) / str(number))
                running[name].block(WARM_STEPS)
            for _ in range(rounds):
                for name in draw.sample(list(sides), len(sides)):
                    seconds[name].append(running[name].block(steps))
        finally:
            for side in running.values():
                side.close()
    first = statistics.median(next(iter(seconds.values())))
    rows = [
        {
            "side": name,
            "ranks": plans[name].world_size,
            "steps_per_s": steps / statistics.median(found),
            "against_first": first / statistics.median(found),
        }
        for name, found in seconds.items()
    ]
    return {"plan": plan.name, "rounds": rounds, "steps_a_block": steps, "rows": rows, "seconds": seconds}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", nargs="?", default="quickstart", help="a plan's TOML file or a preset's name")
    parser.add_argument("changes", nargs="*", help="overrides of every side, such as cluster.collectives=shm")
    parser.add_argument("--sides", choices=list(SIDES), default="placements")
    parser.add_argument("--rounds", type=int, default=15, help="blocks of each side")
    parser.add_argument("--steps", type=int, default=4, help="steps of a block")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    from mmlab.plan import Plan

    plan = Plan.load(arguments.plan).with_(*arguments.changes)
    found = measure(plan, SIDES[arguments.sides], arguments.rounds, arguments.steps)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    print(f"{found['plan']}, {found['rounds']} rounds of {found['steps_a_block']} steps a side, medians")
    print(f"{'side':38} ranks  steps/s  against the first")
    for row in found["rows"]:
        print(f"{row['side']:38} {row['ranks']:5}  {row['steps_per_s']:7.3f}  {row['against_first']:.2f}")


if __name__ == "__main__":
    main()
