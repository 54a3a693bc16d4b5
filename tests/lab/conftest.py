"""One lab for most tests: engines take seconds to start. Registry, runs and profile are the tests' own."""

import os
import sys
import time
from pathlib import Path

import psutil
import pytest

from mmlab import Plan, Run
from mmlab.lab import Lab
from mmlab.tracking import ENDED

HERE = Path(__file__).parent
FAKE = "fake_worker"


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
    for run in [Run(folder) for folder in lab.info()["runs"]]:
        if run.status()["state"] not in ENDED:
            run.stop()
            eventually(lambda run=run: run.status()["state"] in ENDED)


@pytest.fixture
def plan():
    """A plan of three ranks that the fake worker steps through."""
    return Plan.preset("laptop").with_("train.steps=100000", {"name": "fake"})


def processes(lab):
    """Everything that a lab says it has started, its keeper too."""
    info = lab.info()
    return [(p["pid"], p["started"]) for p in info["processes"]] + [(info["keeper"]["pid"], info["keeper"]["started"])]


def alive(pids):
    """Those of these processes that live."""
    found = []
    for pid, started in pids:
        try:
            process = psutil.Process(pid)
            if abs(process.create_time() - started) < 2 and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.NoSuchProcess:
            pass
    return found


def assert_ended(pids, timeout=15.0):
    """None of these processes lives on; ends those that do, by pid, so that tests leave none."""
    end = time.monotonic() + timeout
    while (left := alive(pids)) and time.monotonic() < end:
        time.sleep(0.05)
    for process in left:
        process.kill()
    assert not left


def eventually(condition, timeout=30.0):
    """Wait for a condition and return its value; fails after `timeout` seconds."""
    end = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.02)
    return value


def python(code, **environment):
    """The arguments and environment of a Python process that runs some code."""
    return [sys.executable, "-c", code], os.environ | environment
