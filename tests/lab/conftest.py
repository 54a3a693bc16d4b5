"""One lab for most tests: engines take seconds to start. Registry, runs and profile are the tests' own."""

import os
from pathlib import Path

import pytest
from lab_helpers import FAKE, assert_ended, eventually, processes

from mmlab import Plan, Run
from mmlab.lab import Lab
from mmlab.tracking import ENDED

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """Environment of the tests' own for labs, runs and IPython profiles."""
    folder = tmp_path_factory.mktemp("labs")
    values = {
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "IPYTHONDIR": str(folder / "ipython"),
        "MMLAB_RUNS": str(folder / "runs"),
        "PYTHONPATH": os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    yield folder
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


@pytest.fixture(scope="session")
def lab(place):
    """Three engines with the fake worker."""
    lab = Lab(engines=3, worker=FAKE)
    try:
        lab.wait(timeout=90)
        yield lab
    finally:
        pids = processes(lab)
        lab.close()
        assert_ended(pids)


@pytest.fixture
def free_lab(lab):
    """The shared lab, with no run at work before and after."""
    yield lab
    folders = [Path(folder) for folder in lab.info()["runs"]]
    for run in [Run(folder) for folder in folders if folder.is_dir()]:  # a test may have deleted one
        if run.status()["state"] not in ENDED:
            run.stop()
            eventually(lambda run=run: run.status()["state"] in ENDED)


@pytest.fixture
def plan():
    """A plan of three ranks that the fake worker steps through; a failure ends it."""
    return Plan.preset("laptop").with_("train.steps=100000", "cluster.max_recoveries=0", {"name": "fake"})
