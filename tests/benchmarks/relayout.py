"""Seconds without a finished step: `run.relayout` against stopping, and starting again from a checkpoint.

Three ways from one layout to the other, in turns and in one run, each to the other layout and back:
`relayout`; `same_lab`: checkpoint, stop, the other plan, restore in the same lab (the engines live); `new_lab`: the
same in a lab of its own, as who runs a job anew has it (controller and engines are started again). Measured is the
time between the events of the last step before and the first step after, less that step's own.

    python tests/benchmarks/relayout.py [PLAN] [--to KEY=VALUE ...] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from mmlab import Plan
from mmlab.lab import Lab, Run

TO = ("parallel.tp=1", "parallel.dp=2")
"""What changes in the quickstart plan: tensor-parallel ranks become replicas."""
BETWEEN = 3
"""Steps between two changes of layout, at least."""
WAIT = 180.0


def gap(run: Run, step: int) -> float:
    """Seconds between the ends of `step` and the next one, less what the next one took itself."""
    ends = {event["step"]: event for event in run.metrics()}
    return ends[step + 1]["t"] - ends[step]["t"] - ends[step + 1]["seconds"]


def relayout(run: Run, lab: Lab, plan: Plan) -> tuple[float, Lab]:
    """Go on in the other layout."""
    step = run.relayout(plan).wait(WAIT).step
    run.wait(step=step + 1, timeout=WAIT, progress=False)
    return gap(run, step), lab


def restart(run: Run, lab: Lab, plan: Plan, anew: bool) -> tuple[float, Lab]:
    """Stop with a checkpoint, and start again from it in the other layout."""
    run.stop()  # saves its last step
    run.wait(timeout=WAIT, progress=False)
    step = run.status()["step"]
    plan.save(run.dir / "plan.toml")
    if anew:
        lab.close()
        lab = Lab(engines=plan.world_size)
    run.restore(step=step, lab=lab)
    run.wait(step=step + 1, timeout=WAIT, progress=False)
    return gap(run, step), lab


WAYS = {
    "relayout": relayout,
    "same_lab": lambda run, lab, plan: restart(run, lab, plan, anew=False),
    "new_lab": lambda run, lab, plan: restart(run, lab, plan, anew=True),
}


def measure(plan: Plan, changes: tuple[str, ...], rounds: int) -> dict[str, list[float]]:
    """Seconds of each way, one number a change of layout."""
    there, back = plan.with_(*changes), plan
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    lab = Lab(engines=max(there.world_size, back.world_size))
    try:
        run = lab.train(back)
        run.wait(step=2, timeout=WAIT, progress=False)
        for _ in range(rounds):
            for way, go in WAYS.items():
                for target in (there, back):
                    taken, lab = go(run, lab, target)
                    seconds[way].append(taken)
                    run.wait(step=run.status()["step"] + BETWEEN, timeout=WAIT, progress=False)
        assert run.ledger().ok, run.ledger().problems
        run.stop()
        run.wait(timeout=WAIT, progress=False)
    finally:
        lab.close()
    return seconds


def main() -> None:
    """Print medians and their ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", nargs="?", default="quickstart")
    parser.add_argument("--to", nargs="+", default=list(TO))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    plan = Plan.load(options.plan).with_({"train.steps": 100_000, "checkpoint.every_steps": 0})
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MMLAB_RUNS"] = folder
        began = time.time()
        seconds = measure(plan, tuple(options.to), options.rounds)
    medians = {way: statistics.median(found) for way, found in seconds.items()}
    for way, found in seconds.items():
        spread = f"{min(found):.2f} to {max(found):.2f}"
        ratio = medians[way] / medians["relayout"]
        print(f"{way:9} {medians[way]:6.2f} s ({spread}), {ratio:.1f} times relayout")
    print(f"{options.rounds} rounds, two changes each, {time.time() - began:.0f} s in all")
    if options.json:
        options.json.write_text(json.dumps({"seconds": seconds, "medians": medians}, indent=1))


if __name__ == "__main__":
    main()
