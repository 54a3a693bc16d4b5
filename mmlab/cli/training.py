"""Commands that train: demo and run. Headless, on local engines that end with the command."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from mmlab.cli.progress import follow_run
from mmlab.cli.shared import JsonOption, Overrides, PlanArgument, check_writable, console, load_plan, write_results
from mmlab.errors import MmlabError, RunFailed

if TYPE_CHECKING:
    from mmlab.lab import Lab, Run
    from mmlab.plan import Plan
    from mmlab.ui.feed import Feed

STOP_TIMEOUT = 20.0
"""Seconds that an interrupted run gets to end at its next step boundary."""


def register(app: typer.Typer) -> None:
    """Add the commands that train."""
    for command in (demo, run):
        app.command(rich_help_panel="Train")(command)


def demo(
    steps: Annotated[int | None, typer.Option(min=1, help="Optimizer steps; default: the preset's.")] = None,
    json: JsonOption = None,
) -> None:
    """Train the quickstart plan on real images with six local ranks, and write a report."""
    check_writable(json)
    plan = load_plan("quickstart", None if steps is None else [f"train.steps={steps}"])
    results = train(plan)
    _finish(results, json)
    out = console()
    held_out = results.get("held_out")
    if held_out:
        ratio = held_out["ratio"]
        out.print(
            f"held-out loss {held_out['loss']:.3f}; with images swapped {held_out['loss_swapped']:.3f} ({ratio:.2f} x)"
        )
    if results["loss_fall"] is not None:
        out.print(
            f"training loss fell by {results['loss_fall']:.0%} (means of the first and the last tenth of the steps)"
        )
    _print_places(results)


def run(plan: PlanArgument, overrides: Overrides = None, json: JsonOption = None) -> None:
    """Train a plan, on as many local engines as it needs."""
    check_writable(json)
    results = train(load_plan(plan, overrides))
    _finish(results, json)
    _print_places(results)


def train(plan: Plan) -> dict[str, Any]:
    """Train a plan in a lab of this process and write its report; the results as `--json` holds them.

    PlanError on problems of the plan. An interrupt stops the run at its next step boundary and then ends the command.
    """
    plan.check().raise_if_any()
    return _in_own_lab(plan, lambda lab: lab.train(plan))


def continue_run(run: Run, step: int | None, name: str, changes: list[str]) -> None:
    """Start a run that has ended again from a checkpoint, in a lab of this process, and follow it to its end; in a
    kernel start it and return."""
    plan = run.restored_plan(*changes) if changes else run.plan
    _goes_on(plan, lambda lab: cast("Run", run.restore(step=step, name=name, lab=lab, plan=changes)))


def branch_run(run: Run, changes: list[str], step: int | None, name: str) -> None:
    """Start a new run from a checkpoint of a run, in a lab of this process, and follow it to its end; in a kernel start
    it and return."""
    plan = run.branched_plan(*changes, step=step, name=name)
    _goes_on(plan, lambda lab: run.branch(*changes, step=step, name=name, lab=lab))


def _goes_on(plan: Plan, start: Callable[[Lab], Run]) -> None:
    """Train what `start` starts in a lab of its own."""
    from mmlab.tracking.progress import in_kernel

    if in_kernel():
        _left_alone(plan, start)
        return
    results = _in_own_lab(plan, start)
    _finish(results, None)
    _print_places(results)


def _left_alone(plan: Plan, start: Callable[[Lab], Run]) -> None:
    """Start a run in a lab that outlives this command: a cell comes back, and the run goes on meanwhile."""
    from mmlab.lab import Lab

    lab = Lab(engines=plan.world_size, profile=plan.cluster.profile)
    try:
        started = start(lab)
    except BaseException:  # refused or interrupted: nobody else would close it
        lab.close()
        raise
    out = console()
    out.print(f"run {started.dir}", markup=False, soft_wrap=True)
    out.print(f"it starts in lab {lab.id} and goes on meanwhile; %mmlab status shows it, %mmlab close ends the lab")


def _in_own_lab(plan: Plan, start: Callable[[Lab], Run]) -> dict[str, Any]:
    from mmlab.lab import Lab
    from mmlab.ui.report import write_report

    began = time.perf_counter()
    with Lab(engines=plan.world_size, profile=plan.cluster.profile) as lab:
        started = start(lab)
        console().print(f"run {started.dir}")
        with _stops_on_interrupt(started):
            feed = follow_run(started.dir, lambda: _lab_text(lab.status()))
    seconds = time.perf_counter() - began
    return results_of(feed, seconds) | {"report": str(write_report(feed.paths.root))}


def results_of(feed: Feed, seconds: float) -> dict[str, Any]:
    """What `--json` holds of a run; `loss_fall` compares the mean of the first and the last tenth of the steps.

    RunFailed when the run was deleted: there is nothing to report from.
    """
    if feed.state == "deleted":
        raise RunFailed(f"run {feed.record.id} was deleted: {feed.reason}")
    losses = [event["loss"] for event in feed.record.metrics()]
    span = max(1, len(losses) // 10)
    fall = 1 - (sum(losses[-span:]) / sum(losses[:span])) if len(losses) > 1 else None
    return {
        "world_size": feed.plan.world_size,
        "state": feed.state,
        "reason": feed.reason,
        "cause": feed.record.cause(),
        "losses": losses,
        "loss_fall": fall,
        "held_out": held_out(feed),
        "seconds": seconds,
        "tokens_per_s": feed.last.get("tokens_per_s"),
        "images_per_s": feed.last.get("images_per_s"),
        "run": str(feed.paths.root),
        "plan": feed.plan.model_dump(mode="json"),
    }


def held_out(feed: Feed) -> dict[str, float | None] | None:
    """The last evaluation: loss, loss with images swapped between samples, and their ratio; None without one."""
    if not feed.evals:
        return None
    loss, swapped = feed.evals[-1]["loss"], feed.evals[-1].get("loss_swapped")
    return {"loss": loss, "loss_swapped": swapped, "ratio": swapped / loss if swapped is not None and loss else None}


def _finish(results: dict[str, Any], json: Path | None) -> None:
    """Write the results; RunFailed, naming rank and logs, when they are those of a failed run."""
    write_results(json, results)
    if results["state"] == "failed":
        logs = Path(results["run"]) / "logs"
        message = f"{results['reason']}\nlogs: {logs}\nreport: {results['report']}"
        raise RunFailed(message, results["cause"])


@contextmanager
def _stops_on_interrupt(run: Run) -> Iterator[None]:
    """An interrupt, or SIGTERM (Kubernetes, Slurm), stops the run at its next step boundary, where it saves; a second
    one ends the command at once."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        console(stderr=True).print("stopping the run after its step (Ctrl-C again: end at once)")
        with suppress(MmlabError):  # a run that failed or does not stop in time is ended with its lab
            run.stop()
            run.wait(timeout=STOP_TIMEOUT)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _lab_text(status: dict[str, Any]) -> str:
    return f"engines: {status['ready']} of {status['engines']} up"


def _print_places(results: dict[str, Any]) -> None:
    out = console()
    out.print(f"{results['state']} after {len(results['losses'])} steps, {results['seconds']:.0f} s")
    out.print(f"run:    {results['run']}", soft_wrap=True)
    out.print(f"report: {results['report']}", soft_wrap=True)
