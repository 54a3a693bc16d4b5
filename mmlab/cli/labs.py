"""Commands about labs and JupyterLab."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from mmlab.cli.shared import console
from mmlab.errors import LabError

NOTEBOOKS = (
    "01_quickstart.ipynb",
    "02_pipeline_schedules.ipynb",
    "03_tensor_and_sequence.ipynb",
    "04_sharding_and_offload.ipynb",
    "05_gradient_compression.ipynb",
    "06_kill_a_rank.ipynb",
    "07_feeding_the_ranks.ipynb",
)
"""Notebooks that come with the package; JupyterLab opens on the first."""


def register(app: typer.Typer) -> None:
    """Add the commands about labs."""
    for name, command in (("lab", lab), ("labs", list_labs), ("close", close)):
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


def place_notebooks(folder: Path) -> Path:
    """Copy the notebooks into a folder, but for those that are there; the path of the quickstart one. LabError when
    they cannot be written."""
    for name in NOTEBOOKS:
        target = folder / name
        if target.exists():
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(packaged_notebook(name), target)
        except OSError as error:
            raise LabError(f"{target}: cannot be written ({error.strerror}); name a writable folder") from None
    return folder / NOTEBOOKS[0]


def packaged_notebook(name: str) -> Path:
    """A notebook in the installed package, or in the source tree of an editable installation."""
    package = Path(str(files("mmlab")))
    places = (package / "notebooks" / name, package.parent / "notebooks" / name)
    for place in places:
        if place.is_file():
            return place
    raise LabError(f"the installation lacks {name}; install mmlab again")


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
