"""Commands about plans, without engines: new, check, layout; and balance and verify, which start ranks of their own."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from mmlab.cli.shared import JsonOption, Overrides, PlanArgument, check_writable, console, load_plan, write_results
from mmlab.errors import PlanError, RunFailed


def register(app: typer.Typer) -> None:
    """Add the commands about plans."""
    for command in (new, check, layout, balance, verify):
        app.command(rich_help_panel="Plans")(command)


def new(preset: Annotated[str, typer.Argument(help="quickstart, laptop, llava-7b, vlm-70b.")]) -> None:
    """Print a preset's plan as TOML: `mmlab new laptop > plan.toml`."""
    from mmlab.plan import Plan

    sys.stdout.write(Plan.preset(preset).dumps())


def check(plan: PlanArgument, overrides: Overrides = None) -> None:
    """Check a plan: each problem with its field and a fix."""
    loaded = load_plan(plan, overrides)
    problems = loaded.check()
    if problems:
        console().print(problems)
        count = len(problems)
        raise PlanError(f"{plan}: {count} problem{'s' if count > 1 else ''}")
    console().print(f"{plan}: no problems; it needs {loaded.world_size} ranks")


def layout(plan: PlanArgument, overrides: Overrides = None) -> None:
    """Show which rank computes what, the pipeline schedule, and what each rank's memory holds."""
    loaded = load_plan(plan, overrides)
    loaded.check().raise_if_any()
    for picture in (loaded.layout(), loaded.schedule(), loaded.memory()):
        sys.stdout.write(f"{picture}\n\n")


def balance(plan: PlanArgument, overrides: Overrides = None) -> None:
    """Measure the layers on this machine and say which split makes the slowest stage fastest."""
    loaded = load_plan(plan, overrides)
    loaded.check().raise_if_any()
    out = console()
    from mmlab.cluster.balance import measure

    with out.status(f"measuring the layers of {loaded.name}"):
        found = measure(loaded)
    for name, seconds in found["times"].items():
        if seconds:
            out.print(f"  {name:<10} {1000 * seconds:8.2f} ms a microbatch, forward and backward")
    split = ", ".join(map(str, found["layers_per_stage"]))
    slowest, even = (f"{1000 * max(found[key]):.2f} ms" for key in ("seconds", "even"))
    out.print(f"slowest rank: {slowest} a microbatch; with an even split {even}")
    out.print(f"parallel.layers_per_stage=[{split}]", markup=False, soft_wrap=True)


def verify(
    plan: PlanArgument,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps to compare.")] = 3,
    json: JsonOption = None,
) -> None:
    """Compare the plan with one process: every gradient and weight, in float64."""
    check_writable(json)
    loaded = load_plan(plan, overrides)
    loaded.check().raise_if_any()
    out = console()
    from mmlab.cluster.verify import verify as verify_plan

    with out.status(f"verifying {loaded.name} on {loaded.world_size} ranks") as status:
        result = verify_plan(loaded, steps=steps, progress=lambda text: status.update(str(text)))
    write_results(json, {**result, "plan": loaded.model_dump(mode="json")})
    out.print(f"{loaded.name}: {result['world_size']} ranks against one process, {steps} steps in float64")
    if off := result["compressors_off"]:
        named = ", ".join(f"{side} {compressor}" for side, compressor in off.items())
        out.print(f"  without compression ({named}): compressed gradients differ by design")
    if loaded.train.optimizer == "onebit_adam" and not loaded.train.reduces_momentum(steps):
        out.print(f"  all of them AdamW: the second moment is frozen after step {loaded.train.freeze_step}")
    for name, what in (("max_rel_loss", "loss"), ("max_rel_grad", "gradients"), ("max_rel_param", "weights")):
        out.print(f"  largest relative difference of the {what}: {result[name]:.2e}")
    if not result["ok"]:
        raise RunFailed(f"the plan differs from one process; worst: {result.get('worst')}")
    own = result["own_precision"]
    out.print(f"  step 1 in its own precision: loss {own['loss']:.2e}, gradients {own['grad']:.2e}")
    out.print(f"  the same, within tolerance ({result['seconds']:.1f} s)")
