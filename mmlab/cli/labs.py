"""Commands about labs and JupyterLab."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from mmlab.cli.shared import console
from mmlab.errors import LabError
from mmlab.lessons import place_notebooks


def register(app: typer.Typer) -> None:
    """Add the commands about labs."""
    for name, command in (("lab", lab), ("labs", list_labs), ("grow", grow), ("close", close)):
        settings = {"ignore_unknown_options": True} if name == "lab" else {}  # JupyterLab's own
        app.command(name, rich_help_panel="Labs", context_settings=settings)(command)


def lab(
    folder: Annotated[Path, typer.Argument(help="The working folder.")] = Path(),
    arguments: Annotated[
        list[str] | None, typer.Argument(help="Passed on to JupyterLab, such as --no-browser.")
    ] = None,
) -> None:
    """Open JupyterLab on the quickstart notebook (all are copied to the folder where they are not there)."""
    passed_on = arguments or []
    if str(folder).startswith("-"):  # no folder was named: the first word is JupyterLab's already
        folder, passed_on = Path(), [str(folder), *passed_on]
    if not has_sidebar():
        console().print(
            "JupyterLab without mmlab's sidebar: install mmlab again with Node 20.19 or newer on PATH to have it"
        )
    command = [sys.executable, "-m", "jupyterlab", str(place_notebooks(folder)), *passed_on]
    process = subprocess.Popen(command)
    while True:
        try:
            code = process.wait()
            break
        except KeyboardInterrupt:
            continue  # the terminal interrupts JupyterLab too, which asks and ends by itself
    if code:
        raise LabError(f"JupyterLab ended with exit code {code}; its messages are above")


def has_sidebar() -> bool:
    """Whether the JupyterLab extension is installed, which needs Node at installation."""
    from jupyter_core.paths import jupyter_path

    return any(Path(folder, "mmlab", "package.json").is_file() for folder in jupyter_path("labextensions"))


def list_labs() -> None:
    """List the live labs of this user."""
    from rich.table import Table

    from mmlab.lab import Lab

    found = Lab.live()
    if not found:
        console().print("no live labs")
        return
    table = Table("lab", "state", "engines", "newest run", box=None)
    for one in found:
        status = one.status()
        table.add_row(
            one.id, status["state"], f"{status['ready']} of {status['engines']}", one.run.id if one.run else ""
        )
    console().print(table)


def grow(
    name: Annotated[str, typer.Argument(metavar="LAB", help="A lab's id.")],
    engines: Annotated[int, typer.Argument(min=1, help="Engines in all.")],
) -> None:
    """Have a lab start more engines; the run at work goes on as it is."""
    from mmlab.cluster.registry import status_text
    from mmlab.lab import Lab

    console().print(f"lab {status_text(Lab.attach(name).grow(engines).status())}", markup=False)


def close(
    name: Annotated[str, typer.Argument(metavar="[LAB]", help="A lab's id.")] = "",
    all_: Annotated[bool, typer.Option("--all", help="Close all live labs.")] = False,
) -> None:
    """Close a lab: its run stops, its engines end."""
    from mmlab.lab import Lab

    if bool(name) == all_:
        raise LabError("name a lab, or give --all; `mmlab labs` lists them")
    found = [name] if name else [one.id for one in Lab.live()]
    if not found:
        console().print("no live labs")
    for lab_id in found:
        Lab.attach(lab_id).close()
        console().print(f"closed {lab_id}")
