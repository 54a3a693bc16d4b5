"""Commands about DeepSpeed: its JSON with a reason for each value, and what offload costs here."""

from __future__ import annotations

import json as json_module
import sys
from typing import Annotated, Any

import typer

from mmlab.cli.shared import JsonOption, Overrides, PlanArgument, check_writable, console, load_plan, write_results


def register(app: typer.Typer) -> None:
    """Add `deepspeed-config` and `bench offload`."""
    app.command(name="deepspeed-config", rich_help_panel="Plans")(deepspeed_config)
    bench = typer.Typer(help="Measure on this machine.", no_args_is_help=True)
    bench.command(name="offload")(bench_offload)
    # a callback keeps "offload" a command of its own although it is the only one
    bench.callback()(lambda: None)
    app.add_typer(bench, name="bench", rich_help_panel="Plans")


def deepspeed_config(
    plan: PlanArgument,
    overrides: Overrides = None,
    json: Annotated[bool, typer.Option("--json", help="Plain JSON, without the comments.")] = False,
) -> None:
    """Print the JSON that a plan gives DeepSpeed, with a comment on each value."""
    from mmlab.plan import deepspeed

    loaded = load_plan(plan, overrides).with_("parallel.engine=deepspeed")
    loaded.check().raise_if_any()
    text = json_module.dumps(deepspeed.config(loaded), indent=2) if json else deepspeed.commented(loaded)
    sys.stdout.write(text + "\n")


def bench_offload(
    plan: PlanArgument,
    overrides: Overrides = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps on the clock in each mode.")] = 10,
    json: JsonOption = None,
) -> None:
    """Measure each offload mode: steps a second, what that loses, and the device memory it saves."""
    check_writable(json)
    loaded = load_plan(plan, overrides)
    from mmlab.cluster.bench import bench_offload as measure

    out = console()
    with out.status("measuring") as status:
        rows = measure(loaded, steps, lambda text: status.update(text))
    write_results(json, {"plan": loaded.model_dump(mode="json"), "steps": steps, "modes": rows})
    out.print(_table(loaded.name, rows))
    for row in (row for row in rows if "problem" in row):
        out.print(f"{row['mode']} not here: {row['problem']}", markup=False)
    out.print("per rank; peak: of device memory on CUDA, else of the process. Encoder and projector never leave.")


def _table(name: str, rows: list[dict[str, Any]]) -> Any:
    from rich.table import Table

    table = Table(
        "offload", "sharding", "steps/s", "throughput lost", "off the device", "peak", title=f"{name}: offload"
    )
    for row in rows:
        if "problem" in row:
            table.add_row(row["mode"], row["sharding"], "not here", "", "", "")
            continue
        sizes = (f"{row[key] / 1e6:,.1f} MB" for key in ("off_device", "peak"))
        table.add_row(row["mode"], row["sharding"], f"{row['steps_per_s']:.2f}", f"{row['slower']:.0%}", *sizes)
    return table
