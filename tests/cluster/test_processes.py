"""Ending what a lab started: children of killed parents and processes that ignore SIGTERM included."""

import os
import signal
import subprocess
import sys

from mmlab.cluster.processes import MARK, Tracked, end_all, marked, tracked, with_descendants
from mmlab.messages import process_alive

ONE, OTHER = (f"{number}-{os.getpid()}" for number in range(2))
"""Marks that no other process on this machine has."""
CHILD = (
    "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); print(p.pid, flush=True);"
    "time.sleep(600)"
)


def start(lab_id):
    import psutil

    process = subprocess.Popen(
        [sys.executable, "-c", CHILD], env=os.environ | {MARK: lab_id}, stdout=subprocess.PIPE, text=True
    )
    child = int(process.stdout.readline())
    process.stdout.close()
    return process, tracked(psutil.Process(process.pid), "engine"), tracked(psutil.Process(child), "child")


def test_a_stubborn_process_and_its_child_are_ended():
    process, parent, child = start(ONE)
    assert {(p.pid, p.kind) for p in with_descendants([parent])} == {
        (parent.pid, "engine"),
        (child.pid, "child of engine"),
    }
    assert end_all([parent], "", grace=0.2) == []
    assert process.wait(5) == -signal.SIGKILL
    assert not child.alive


def test_an_orphan_is_found_by_its_mark():
    process, parent, child = start(OTHER)
    os.kill(parent.pid, signal.SIGKILL)
    process.wait(5)
    assert with_descendants([parent]) == []
    assert [record.pid for record in marked(OTHER)] == [child.pid]
    assert list(marked("")) == []
    assert end_all([parent], OTHER) == []
    assert not child.alive


def test_a_later_process_with_the_same_pid_is_left_alone():
    me = Tracked(os.getpid(), 1.0, "engine")
    assert not me.alive
    assert with_descendants([me]) == []
    assert end_all([me], "") == []
    assert process_alive(os.getpid())
