"""The notebooks that come with the package."""

from __future__ import annotations

import shutil
from importlib.resources import files
from pathlib import Path

from mmlab.errors import LabError

NOTEBOOKS = (
    "01_quickstart.ipynb",
    "02_pipeline_schedules.ipynb",
    "03_tensor_and_sequence.ipynb",
    "04_sharding_and_offload.ipynb",
    "05_gradient_compression.ipynb",
    "06_kill_a_rank.ipynb",
    "07_feeding_the_ranks.ipynb",
    "08_notebook_to_slurm.ipynb",
)
"""Notebooks that come with the package; JupyterLab opens on the first."""


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
