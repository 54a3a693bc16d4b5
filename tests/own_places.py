"""Labs, runs and profiles of a test's own."""

import os
from pathlib import Path

import pytest

WORKERS = Path(__file__).parent / "lab"
"""Where a worker without torch is, `fake_worker`."""


def own_places(patch: pytest.MonkeyPatch, folder: Path, runs: str = "runs") -> None:
    """Have this process, and what it starts, keep labs, runs and IPython's profiles below a folder; what it starts also
    finds the fake worker."""
    for name, value in {"JUPYTER_RUNTIME_DIR": "runtime", "IPYTHONDIR": "ipython", "MMLAB_RUNS": runs}.items():
        patch.setenv(name, str(folder / value))
    patch.setenv("PYTHONPATH", os.pathsep.join([str(WORKERS), *filter(None, [os.environ.get("PYTHONPATH")])]))
