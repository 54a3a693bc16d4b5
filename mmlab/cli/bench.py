"""`mmlab bench`: what offload costs here, and what compressing gradients gains on a slow link."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mmlab.cli.shared import JsonOption, Overrides, PlanArgument, check_writable, console, load_plan, write_results

FEW = 10
"""Counted steps below which a median is mostly noise."""


def register(app: typer.Typer) -> None:
    """Add `bench offload` and `bench link`."""
    bench = typer.Typer(help="Measure on this machine.", no_args_is_help=True)
    bench.command(name="offload")(bench_offload)
    bench.command(name="link")(bench_link)
    app.add_typer(bench, name="bench", rich_help_panel="Plans")


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
    out.print(_offload_table(loaded.name, rows))
    for row in (row for row in rows if "problem" in row):
        out.print(f"{row['mode']} not here: {row['problem']}", markup=False)
    out.print("per rank; peak: of device memory on CUDA, else of the process. Encoder and projector never leave.")
    if few := few_steps(rows):
        out.print(f"{few} A median of them is mostly noise; try more --steps.", markup=False)


def _offload_table(name: str, rows: list[dict[str, Any]]) -> Any:
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


def bench_link(
    plan: PlanArgument,
    overrides: Overrides = None,
    rate: Annotated[str, typer.Option(help="Bits a second of the link, each way.")] = "100mbit",
    delay: Annotated[str, typer.Option(help="Delay of the link, each way (where the kernel has netem).")] = "0ms",
    seconds: Annotated[float, typer.Option(min=1, help="How long each compressor trains.")] = 20.0,
    compressors: Annotated[
        str, typer.Option(metavar="NAME,...", help="What to compare with dense; topk:0.05 and powersgd:2 set a number.")
    ] = "bf16,fp16,int8,topk,powersgd,onebit",
    json: JsonOption = None,
) -> None:
    """Train with each compressor on two hosts with a slow link between them: steps a second, bytes, loss. Linux, root.

    The hosts are network namespaces of this machine; ranks run on CPU, over gloo.
    """
    check_writable(json)
    from mmlab.cluster.link import bench_link as measure
    from mmlab.cluster.netns import Shape

    loaded = load_plan(plan, overrides)
    names = [name.strip() for name in compressors.split(",") if name.strip()]
    out = console()
    with out.status("starting") as status:
        found = measure(loaded, Shape.parse(rate, delay), names, seconds, lambda text: status.update(text))
    write_results(json, {"plan": loaded.model_dump(mode="json"), **found})
    out.print(_link_table(loaded.name, rate, found["rows"]))
    for row in (row for row in found["rows"] if "problem" in row):
        out.print(f"{row['compressor']} not with this plan: {row['problem']}", markup=False)
    sides = [found["hosts"].count(host) for host in (0, 1)]
    steps, _ = found["rows"][0]["equal_steps"]
    out.print(
        f"Ranks on the hosts: {sides[0]} and {sides[1]}. Handed: MB of gradients that a rank hands over in a "
        "step; sent: MB that a host sends over the link. By bytes: the gain if a step took what one takes without "
        f"summing gradients ({1e3 * found['alone']:.0f} ms), and the time of its bits. Loss: after {steps} steps each, "
        "and after equal time (steps in brackets)."
    )
    if few := few_steps(found["rows"]):
        more = "Their loss is that of one noisy step, and a gain can exceed that by bytes; try a longer --seconds."
        out.print(f"{few} {more}", markup=False)


def few_steps(rows: list[dict[str, Any]]) -> str:
    """Which rows are of fewer than FEW steps, in words; empty when there are none."""
    named = [(row.get("compressor") or f"{row['sharding']}, offload {row['mode']}", row) for row in rows]
    counts = [(name, len(row["seconds"])) for name, row in named if "problem" not in row]
    few = [f"{name} ({count})" for name, count in counts if count < FEW]
    return f"Few steps on the clock: {'; '.join(few)}." if few else ""


def _link_table(name: str, rate: str, rows: list[dict[str, Any]]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    shown = [row for row in rows if "problem" not in row]
    table = Table(title=f"{name}: two hosts, {rate}", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("compressor", no_wrap=True)
    for heading in ("steps/s", "gain", "by bytes", "handed", "sent", "loss", "in time"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in shown:
        reached, loss = row["equal_time"]
        speed = (f"{row['steps_per_s']:.2f}", f"{row['ratio']:.2f} x", f"{row['predicted']:.2f} x")
        sizes = (f"{row[key] / 1e6:,.2f}" for key in ("handed", "sent"))
        table.add_row(row["compressor"], *speed, *sizes, f"{row['equal_steps'][1]:.3f}", f"{loss:.3f} ({reached})")
    return table
