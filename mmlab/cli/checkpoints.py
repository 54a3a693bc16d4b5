"""Commands about a run's checkpoints: list, compare, name, delete, branch off one."""

from __future__ import annotations

from typing import Annotated

import typer

from mmlab.cli.runs import CheckpointName, CheckpointStep
from mmlab.cli.shared import JsonOption, Overrides, RunArgument, check_writable, console, open_run, write_results

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The checkpoint's name.")]
WhichArgument = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="A checkpoint's name, or its step.")]


def register(app: typer.Typer) -> None:
    """Add the commands about checkpoints."""
    for command in (checkpoints, compare, rename_checkpoint, delete_checkpoint, branch):
        app.command(command.__name__.replace("_", "-"), rich_help_panel="Checkpoints")(command)


def checkpoints(run: RunArgument, json: JsonOption = None) -> None:
    """List a run's checkpoints, branch by branch."""
    from mmlab.tracking.tree import CheckpointTree

    check_writable(json)
    found = open_run(run)
    tree = CheckpointTree.of(found)
    console().print(str(tree), markup=False, soft_wrap=True)
    write_results(json, tree.to_json())


def compare(
    run: RunArgument,
    first: WhichArgument,
    second: WhichArgument,
    of: Annotated[str, typer.Option("--of", metavar="RUN", help="The run that has the second one.")] = "",
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that reading the weights may take.")] = 600.0,
    json: JsonOption = None,
) -> None:
    """Show what differs between two checkpoints: the plan, and the weights by module."""
    check_writable(json)
    other = open_run(of) if of else None
    found = open_run(run).compare(first, second, other, timeout)
    console().print(str(found), markup=False, soft_wrap=True)
    write_results(json, found.to_json())


def rename_checkpoint(
    run: RunArgument, name: NameArgument, new: Annotated[str, typer.Argument(help="The new name.")]
) -> None:
    """Give a checkpoint a name; from then on it is kept until it is deleted."""
    row = open_run(run).rename_checkpoint(name, new)
    console().print(f"checkpoint {name} of step {row['step']} is now {new}, and kept", markup=False)


def delete_checkpoint(
    run: RunArgument,
    name: NameArgument,
    force: Annotated[bool, typer.Option(help="Also the one that a live run would recover from.")] = False,
) -> None:
    """Delete a checkpoint."""
    row = open_run(run).delete_checkpoint(name, force)
    console().print(f"deleted checkpoint {name} of step {row['step']} ({row['bytes'] / 1e6:.1f} MB)", markup=False)


def branch(
    run: RunArgument,
    changes: Overrides = None,
    step: CheckpointStep = None,
    name: CheckpointName = "",
) -> None:
    """Start a new run from a checkpoint of a run, with changes to its plan, in a live lab or in one of its own."""
    from mmlab.cli.training import branch_run
    from mmlab.lab import Lab

    found, given = open_run(run), changes or []
    if not Lab.live():
        branch_run(found, given, step, name)
        return
    new = found.branch(*given, step=step, name=name)
    console().print(f"run {new.dir}", markup=False, soft_wrap=True)
    if (status := new.status())["state"] == "queued" and status["reason"]:
        console().print(f"queued: {status['reason']}", markup=False)
