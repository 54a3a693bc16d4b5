"""What several commands need: plans and runs by name, JSON files, the console."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmlab.errors import LabError, MmlabError

if TYPE_CHECKING:
    from rich.console import Console

    from mmlab.lab import Run
    from mmlab.plan import Plan

PlanArgument = Annotated[str, typer.Argument(metavar="PLAN", help="A plan's TOML file, or a preset's name.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Changes to the plan, such as parallel.tp=2.")
]
JsonOption = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the results to this file.")]
RunArgument = Annotated[
    str, typer.Argument(metavar="RUN", help="A run's folder, its name or the start of it, or 'last'.")
]


def console(stderr: bool = False) -> Console:
    """A rich console on stdout (or stderr)."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def load_plan(name: str, overrides: list[str] | None = None) -> Plan:
    """A plan by path or preset name, with overrides. PlanError names what is wrong."""
    from mmlab.plan import Plan

    plan = Plan.load(name)
    return plan.with_(*overrides) if overrides else plan


def find_run(name: str) -> Path:
    """The folder of a run by path, name, unique start of its name, or "last". LabError when there is none."""
    from mmlab.messages.runs import runs_root
    from mmlab.tracking.record import list_runs

    if Path(name, "run.json").is_file():
        return Path(name)
    folders = [record.paths.root for record in list_runs()]
    if name == "last" and folders:
        return folders[0]
    found = [folder for folder in folders if folder.name == name] or [
        folder for folder in folders if folder.name.startswith(name)
    ]
    if len(found) == 1:
        return found[0]
    if found:
        raise LabError(
            f"{name!r} fits several runs: {', '.join(folder.name for folder in found)}; give more of the name"
        )
    raise LabError(f"no run {name!r} in {runs_root()}; `mmlab runs` lists them (MMLAB_RUNS sets the folder)")


def open_run(name: str) -> Run:
    """A run by the same names as `find_run`, live or not."""
    from mmlab.lab import Run

    return Run.open(find_run(name))


def check_writable(path: Path | None) -> None:
    """Refuse a results file that cannot be written before the work, not after it."""
    if path is None:
        return
    try:
        with open(path, "a", encoding="utf-8"):
            pass
        if path.stat().st_size == 0:
            path.unlink()
    except OSError as error:
        raise MmlabError(
            f"--json {path}: cannot be written ({error.strerror}); name a file in a writable folder"
        ) from None


def write_results(path: Path | None, results: dict[str, Any]) -> None:
    """Write results as JSON, whole or not at all."""
    if path is None:
        return
    from mmlab.messages import write_atomic

    try:
        write_atomic(path, (json.dumps(results, indent=1) + "\n").encode())
    except OSError as error:
        raise MmlabError(f"--json {path}: cannot be written ({error.strerror})") from None
