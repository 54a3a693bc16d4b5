"""What tests of labs share: processes of a lab, and waiting for conditions."""

import os
import sys
import time

import psutil

FAKE = "fake_worker"


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


def assert_ended(pids, timeout=60.0):
    """None of these processes lives on; ends those that do, by pid, so that tests leave none."""
    end = time.monotonic() + timeout
    while (left := alive(pids)) and time.monotonic() < end:
        time.sleep(0.05)
    for process in left:
        process.kill()
    assert not left


def eventually(condition, timeout=60.0):
    """Wait for a condition and return its value; fails after `timeout` seconds: engines start, on a busy machine."""
    end = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.02)
    return value


def python(code, **environment):
    """The arguments and environment of a Python process that runs some code."""
    return [sys.executable, "-c", code], os.environ | environment
