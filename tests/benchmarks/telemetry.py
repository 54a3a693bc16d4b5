"""What watching a run costs: steps per second with telemetry, event log and an open dashboard, against without them.

Both sides are whole sessions of the trainer in the same warm ranks, which take turns in short blocks, so that whatever
else the machine does hits both. Processor time, which neighbours disturb less, is compared too. `on`: phase times of
each rank, beacons, traces, the event log, and a dashboard in another process that reads the run and sends to its widget
ten times a second (twice as often as in a notebook). `off`: none of these; the dashboard's process is stopped
meanwhile.

    python tests/benchmarks/telemetry.py [PLAN] [--rounds 24] [--steps 5] [--json FILE]
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
from typing import Any

PERIOD = 0.1
"""Seconds between the dashboard's looks at the run and messages to its views."""
WARM_STEPS = 3
"""Steps of each side before anything is timed: allocators, caches, connections."""
MOST_STEPS = 1_000_000
RESAMPLES = 2000
"""Times that the rounds are drawn anew for the interval of the overhead (bootstrap)."""


# -- the ranks


def session(plan, paths, mesh, listener, watched):
    """The trainer's own session; not watched means no telemetry, beacon, trace or event log."""
    from mmlab.messages import Beacon
    from mmlab.parallel.watch import Watch
    from mmlab.train.build import build
    from mmlab.train.session import Session

    rank, role = mesh.place.rank, mesh.place.label
    if watched:
        beacon = Beacon(paths.ranks / f"rank-{rank}.beacon", rank, role, os.uname().nodename, 1)
        watch = Watch(beacon, paths.traces / f"rank-{rank}.jsonl")
    else:
        plan = plan.with_({"tracking.telemetry": False, "tracking.trace_every": 0})
        watch = Watch(telemetry=False)
    made = Session(plan, paths, mesh, build(plan, mesh), watch, listener)
    if not watched and made.log is not None:
        made.log.close()
        made.log = None
    made.start(None)
    made.emit("state", step=0, state="running", reason="")
    return made


def block(made, steps):
    """(seconds, processor seconds of all ranks) of a block of steps, from barrier to barrier."""
    made.channel.gather(None)
    began, used = time.perf_counter(), time.process_time()
    for _ in range(steps):
        made.step()
        made.apply_commands()
    all_used = made.channel.gather(time.process_time() - used)
    return time.perf_counter() - began, sum(all_used)


def processor_seconds(pid):
    """What a process has used so far."""
    import psutil

    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def alternate(rank, world, host, port, run_dir, dashboard, rounds, steps):
    """`block` of each round by side, and the dashboard's processor seconds; the side that goes first changes."""
    import torch
    import torch.distributed as dist

    from mmlab.messages import RunPaths
    from mmlab.parallel.abort import Connections
    from mmlab.parallel.mesh import build_mesh, close_mesh
    from mmlab.plan import Plan
    from mmlab.train.control import Listener

    paths = RunPaths(Path(run_dir))
    plan = Plan.load(paths.plan)
    store = dist.TCPStore(host, port, is_master=False)
    mesh = build_mesh(plan, plan.layout(), rank, store, torch.device("cpu"))
    listener = Listener(paths, rank, 1, Connections())
    sides = {name: session(plan, paths, mesh, listener, name == "on") for name in ("off", "on")}
    found: dict[str, list[tuple[float, float]]] = {"on": [], "off": []}
    try:
        for made in sides.values():
            block(made, WARM_STEPS)
        before = processor_seconds(dashboard)
        for number in range(rounds):
            for name in ("on", "off") if number % 2 else ("off", "on"):
                if rank == 0:
                    os.kill(dashboard, signal.SIGCONT if name == "on" else signal.SIGSTOP)
                found[name].append(block(sides[name], steps))
        return found | {"dashboard": processor_seconds(dashboard) - before}
    finally:
        for made in sides.values():
            made.close()
        listener.close()
        close_mesh(mesh)


# -- the dashboard


def watch_run(run_dir):
    """A dashboard of the run, as a kernel has it, with a view that tells that it is there."""
    from mmlab.lab import Run
    from mmlab.ui.dashboard import Dashboard

    dashboard = Dashboard(Run(run_dir), run_dir, period=PERIOD)
    print("watching", flush=True)
    parent = os.getppid()
    while os.getppid() == parent:
        dashboard.view._handle_custom_msg({"kind": "here"}, [])
        time.sleep(5)


# -- the measurement


def measure(plan, rounds, steps):
    """Medians of steps per second of both sides and the overhead in percent, for a plan of at least two ranks."""
    from mmlab.cluster.pool import RankPool
    from mmlab.messages import read_events
    from mmlab.messages.runs import create_run

    plan = plan.with_({"train.steps": MOST_STEPS, "checkpoint.every_steps": 0, "checkpoint.at_end": False})
    with tempfile.TemporaryDirectory(prefix="mmlab-telemetry-") as folder:
        paths = create_run(Path(folder), "telemetry", plan.dumps(), plan.world_size, MOST_STEPS, generation=1)
        command = [sys.executable, __file__, "--watch", str(paths.root)]
        # A group of its own: should this process be killed, the kernel ends the stopped dashboard (SIGHUP).
        with subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0) as dashboard:
            try:
                assert dashboard.stdout is not None
                if dashboard.stdout.readline() != b"watching\n":
                    raise RuntimeError("the dashboard did not start")
                with RankPool(plan.world_size) as pool:
                    arguments = (str(paths.root), dashboard.pid, rounds, steps)
                    found = pool.run("telemetry:alternate", *arguments, timeout=3600)[0]
            finally:
                dashboard.kill()
        logged = sum(event["kind"] == "step" for event in read_events(paths.events)[0])
    return summary(plan, found, steps) | {"logged": logged}


def overhead(on, off):
    """Percent by which the median block takes longer when watched."""
    return 100 * (statistics.median(on) / statistics.median(off) - 1)


def interval(on, off):
    """The 95 % interval of the overhead: rounds drawn with replacement (Efron 1979, percentile bootstrap)."""
    draw, rounds, found = random.Random(0), range(len(on)), []
    for _ in range(RESAMPLES):
        chosen = draw.choices(rounds, k=len(on))
        found.append(overhead([on[i] for i in chosen], [off[i] for i in chosen]))
    found.sort()
    return [found[RESAMPLES // 40], found[-RESAMPLES // 40]]


def summary(plan, found, steps) -> dict[str, Any]:
    """Median steps per second of both sides, and the overhead in time and in processor time with its parts."""
    seconds = {side: [wall for wall, _ in found[side]] for side in ("on", "off")}
    used = {side: [processor for _, processor in found[side]] for side in ("on", "off")}
    dashboard = 100 * found["dashboard"] / sum(used["off"])
    return {
        "plan": plan.name,
        "ranks": plan.world_size,
        "rounds": len(seconds["on"]),
        "steps_a_block": steps,
        "on_steps_per_s": steps / statistics.median(seconds["on"]),
        "off_steps_per_s": steps / statistics.median(seconds["off"]),
        "overhead_percent": overhead(seconds["on"], seconds["off"]),
        "overhead_percent_interval": interval(seconds["on"], seconds["off"]),
        "processor_percent_ranks": overhead(used["on"], used["off"]),
        "processor_percent_ranks_interval": interval(used["on"], used["off"]),
        "processor_percent_dashboard": dashboard,
        "seconds": seconds,
        "processor_seconds": used,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", nargs="?", default="quickstart", help="a plan's TOML file or a preset's name")
    parser.add_argument("--rounds", type=int, default=24, help="alternations, each a block of both sides")
    parser.add_argument("--steps", type=int, default=5, help="steps of a block")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--watch", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.watch:
        watch_run(arguments.watch)
        return
    from mmlab.plan import Plan

    found = measure(Plan.load(arguments.plan), arguments.rounds, arguments.steps)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    print(f"{found['plan']}, {found['ranks']} ranks, {found['rounds']} rounds of {found['steps_a_block']} steps a side")
    print(f"watched   {found['on_steps_per_s']:.3f} steps/s (median)")
    print(f"unwatched {found['off_steps_per_s']:.3f} steps/s (median)")
    print(f"overhead  {percent(found, 'overhead_percent')} (ratio of medians)")
    print(
        f"processor time of the ranks {percent(found, 'processor_percent_ranks')}, of the dashboard "
        f"{found['processor_percent_dashboard']:.2f} %"
    )


def percent(found, key) -> str:
    """A value with its 95 % interval."""
    low, high = found[f"{key}_interval"]
    return f"{found[key]:+.2f} % (95 % interval {low:+.2f} to {high:+.2f} %)"


if __name__ == "__main__":
    main()
