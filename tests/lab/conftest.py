"""One lab for most tests: engines take seconds to start. Registry, runs and profile are the tests' own."""

from pathlib import Path

import pytest
from lab_helpers import FAKE, assert_ended, eventually, processes
from own_places import own_places

from mmlab import Plan, Run
from mmlab.lab import Lab
from mmlab.tracking import ENDED


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """Environment of the tests' own for labs, runs and IPython profiles."""
    folder = tmp_path_factory.mktemp("labs")
    with pytest.MonkeyPatch.context() as patch:
        own_places(patch, folder)
        yield folder


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
