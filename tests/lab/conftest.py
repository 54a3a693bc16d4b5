"""One lab for most tests: engines take seconds to start. Registry, runs and profile are the tests' own."""

import contextlib
from pathlib import Path

import pytest
from lab_helpers import FAKE, assert_ended, eventually, processes
from own_places import own_places
from what_happened import FAILED

from mmlab import MmlabError, Plan, Run
from mmlab.lab import Lab
from mmlab.tracking import ENDED


@pytest.fixture(scope="session")
def labs_folder(tmp_path_factory):
    """Where labs, runs and IPython profiles of these tests are."""
    return tmp_path_factory.mktemp("labs")


@pytest.fixture(scope="module", autouse=True)
def place(labs_folder):
    """Environment of the tests' own for labs, runs and IPython profiles, for as long as a module of them runs."""
    with pytest.MonkeyPatch.context() as patch:
        own_places(patch, labs_folder)
        yield labs_folder


@pytest.fixture(scope="session")
def lab(labs_folder):
    """Three engines with the fake worker."""
    with pytest.MonkeyPatch.context() as patch:
        own_places(patch, labs_folder)
        lab = Lab(engines=3, worker=FAKE)
    try:
        lab.wait(timeout=90)
        yield lab
    finally:
        pids = processes(lab)
        lab.close()
        assert_ended(pids)


def end_runs(lab):
    """Have no run at work in a lab."""
    folders = [Path(folder) for folder in lab.info().get("runs", [])]
    for run in [Run(folder) for folder in folders if folder.is_dir()]:  # a test may have deleted one
        with contextlib.suppress(MmlabError):  # it has ended, or fails, or its ranks hang
            run.stop()
            run.wait(timeout=30, progress=False)
        if run.status()["state"] not in ENDED:
            run.abort()
            eventually(lambda run=run: run.status()["state"] in ENDED)


@pytest.fixture
def free_lab(lab):
    """The shared lab, with no run at work before and after."""
    yield lab
    end_runs(lab)


@pytest.fixture(autouse=True)
def _a_failed_test_leaves_no_run(request):
    """A failed test leaves no run at work in a lab of its module: the following ones would find that busy."""
    yield
    if request.node.stash.get(FAILED, False):
        for lab in Lab.live():
            end_runs(lab)


@pytest.fixture
def plan():
    """A plan of three ranks that the fake worker steps through; a failure ends it."""
    return Plan.preset("laptop").with_("train.steps=100000", "cluster.max_recoveries=0", {"name": "fake"})
