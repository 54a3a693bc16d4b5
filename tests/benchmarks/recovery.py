"""Seconds from `kill -9` of a rank to the end of the next step: a lab's recovery against torchrun's restart.

Three jobs of one plan take turns while the others are paused, a kill each: `lab` (the lost engine is started anew),
`spare` (a warm engine waits for it, `cluster.spares = 1`), `torchrun --max-restarts` (which ends all ranks and starts
them again; the same worker goes on from its newest checkpoint). Measured from the signal to the time in the event of
the first step of the next generation; one step of an undisturbed run is in all of them.

    python tests/benchmarks/recovery.py [PLAN] [--kills 7] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from mmlab import Plan
from mmlab.lab import Lab, Run
from mmlab.tracking.record import list_runs

WAIT = 180.0
BETWEEN = 4
"""Steps between two kills of one job, at least: there is a checkpoint among them."""


class InLab:
    """A run in a lab."""

    def __init__(self, plan: Plan, spares: int) -> None:
        self.spares, self.wanted = spares, plan.world_size + spares
        self.lab = Lab(engines=self.wanted)
        self.run = self.lab.train(plan.with_(f"cluster.spares={spares}"))

    def ready(self) -> None:
        """Until the spare is back, and has imported torch."""
        self.lab.wait(WAIT)
        self.lab.view.apply_sync(warmed)

    def close(self) -> None:
        """End it all."""
        self.lab.close()


class Torchrun:
    """The same under torchrun."""

    def __init__(self, plan: Plan, folder: Path, restarts: int) -> None:
        folder.mkdir()
        plan.save(folder / "plan.toml")
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(plan.world_size)]
        arguments = [*torchrun, "--max-restarts", str(restarts), "-m", "mmlab.train", str(folder / "plan.toml")]
        more = {"MMLAB_RUNS": str(folder / "runs"), "OMP_NUM_THREADS": "1", "MMLAB_RESUME": ""}
        with open(folder / "log", "wb") as log:
            self.process = subprocess.Popen(arguments, env=os.environ | more, stdout=log, stderr=subprocess.STDOUT)
        end = time.monotonic() + WAIT
        while not (found := list_runs(folder / "runs")):
            if time.monotonic() > end or self.process.poll() is not None:
                raise RuntimeError((folder / "log").read_text())
            time.sleep(0.1)
        self.run = Run(found[0].paths.root)

    def ready(self) -> None:
        """It has no spares."""

    def close(self) -> None:
        """End it all."""
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def warmed() -> None:
    """In an engine: import what training needs, or wait until that has been done."""
    import mmlab.train.worker  # noqa: F401


def kill(run: Run, rank: int) -> float:
    """Kill a rank; seconds until the first step of the next generation has ended."""
    found = run.status()["ranks"][rank]
    known = {event["id"] for event in run.events() if event["kind"] == "lineage"}
    began = time.time()
    os.kill(found["pid"], signal.SIGKILL)
    while time.time() - began < WAIT:
        for event in reversed(run.events()):
            if event["kind"] == "step" and event["lineage"] not in known:
                steps = [e["t"] for e in run.events() if e["kind"] == "step" and e["lineage"] not in known]
                return float(steps[0] - began)
        time.sleep(0.02)
    raise RuntimeError(f"{run.id} did not recover: {run.events()[-3:]}")


def measure(plan: Plan, kills: int, folder: Path) -> dict[str, list[float]]:
    """Seconds of each job, one number a kill."""
    jobs: dict[str, InLab | Torchrun] = {}
    seconds: dict[str, list[float]] = {}
    try:
        jobs = {"lab": InLab(plan, 0), "spare": InLab(plan, 1)}
        jobs["torchrun"] = Torchrun(plan, folder / "torchrun", kills + 2)
        for job in jobs.values():
            job.run.wait(step=BETWEEN, timeout=WAIT, progress=False)
            job.run.pause().wait(WAIT)
        for number in range(kills):
            for name, job in jobs.items():
                job.ready()
                step = job.run.resume().wait(WAIT).step
                job.run.wait(step=step + BETWEEN, timeout=WAIT, progress=False)
                time.sleep(0.1 * random.random())
                seconds.setdefault(name, []).append(kill(job.run, number % plan.world_size))
                job.run.pause().wait(WAIT)
        for job in jobs.values():
            assert job.run.ledger().ok, job.run.ledger().problems
    finally:
        for job in jobs.values():
            job.close()
    return seconds


def main() -> None:
    """Print medians and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", nargs="?", default="laptop")
    parser.add_argument("--kills", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    changes = {"train.steps": 1_000_000, "checkpoint.every_steps": 2, "cluster.max_recoveries": 1000}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MMLAB_RUNS"] = f"{folder}/runs"
        seconds = measure(Plan.load(options.plan).with_(changes), options.kills, Path(folder))
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    for name, found in seconds.items():
        spread = f"{min(found):.2f} to {max(found):.2f}"
        print(f"{name:9} {medians[name]:6.2f} s ({spread}), {medians[name] / medians['torchrun']:.2f} of torchrun")
    if options.json:
        options.json.write_text(json.dumps({"seconds": seconds, "medians": medians}, indent=1))


if __name__ == "__main__":
    main()
