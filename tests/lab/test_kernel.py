"""In a real Jupyter kernel: cells return at once, waiting can be interrupted, a restart loses nothing."""

import contextlib
import queue
import time
from pathlib import Path

import pytest
from jupyter_client.manager import KernelManager
from kernels import over_files
from lab_helpers import eventually

from mmlab.messages import read_json

pytestmark = pytest.mark.timeout(300)
SETUP = """
import mmlab
lab = mmlab.Lab.attach({lab!r})
plan = mmlab.Plan.preset("laptop").with_("train.steps=100000", "cluster.max_recoveries=0", {{"name": "fake"}})
"""


class Kernel:
    def __init__(self):
        self._end = contextlib.ExitStack()
        self.manager = KernelManager(kernel_name="python3", **self._end.enter_context(over_files()))
        self.manager.start_kernel()
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=60)

    def run(self, code, timeout=100.0, until=None):
        """Run a cell; {"text", "html", "error"} of its output. With `until`, interrupt it once that text was shown."""
        message = self.client.execute(code)
        found = {"text": "", "html": "", "error": []}
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            try:
                reply = self.client.get_iopub_msg(timeout=1)
            except queue.Empty:
                continue
            if reply["parent_header"].get("msg_id") != message:
                continue
            content, kind = reply["content"], reply["msg_type"]
            if kind == "status" and content["execution_state"] == "idle":
                return found
            if kind == "stream":
                found["text"] += content["text"]
            elif kind in ("display_data", "update_display_data", "execute_result"):
                found["html"] += content["data"].get("text/html", "")
                found["text"] += content["data"].get("text/plain", "")
            elif kind == "error":
                found["error"] = content["traceback"]
            if until is not None and until in found["html"] + found["text"]:
                until = None
                self.manager.interrupt_kernel()
        self.manager.interrupt_kernel()  # the next test's cells would wait for it
        raise AssertionError(f"the cell did not end: {found}")

    def restart(self):
        self.manager.restart_kernel(now=True)
        self.client.wait_for_ready(timeout=60)

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)
        self.manager.cleanup_resources()
        self._end.close()


@pytest.fixture(scope="module")
def kernel(lab):
    kernel = Kernel()
    kernel.run(SETUP.format(lab=lab.id))
    yield kernel
    kernel.close()


def test_waiting_shows_a_bar_and_an_interrupt_ends_only_the_waiting(free_lab, kernel):
    started = kernel.run("run = lab.train(plan); print(run.dir)")
    assert started["error"] == []
    waited = kernel.run("run.wait()", until="<progress")
    assert 'max="100000"' in waited["html"]
    assert len(waited["error"]) == 1
    assert waited["error"][0].startswith("stopped waiting; run ")
    assert kernel.run("print(run.status()['state'])")["text"].strip() in ("queued", "starting", "running")
    done = kernel.run("import asyncio\nrun.stop()\nprint((await run).status()['state'])")
    assert done["text"] == "stopped\n"


def test_errors_are_one_message_without_traceback(free_lab, kernel):
    failed = kernel.run("lab.train(plan.with_('model.language.heads=3'))")
    assert len(failed["error"]) == 1
    assert failed["error"][0].startswith("PlanError: plan fake:")


def test_an_unseen_failure_is_one_line_under_the_next_cell(free_lab, kernel):
    record = kernel.run("run = lab.train(plan.with_({'name': 'held-1'})); print(run.dir)")["text"].strip()
    Path(record, "raise").touch()  # no cell runs meanwhile, under which the failure would be said too early
    eventually(lambda: "failed" in Path(record, "events.jsonl").read_text())
    shown = kernel.run("1 + 1")["text"]
    assert shown.startswith("2") or shown.endswith("2")
    assert "failed: rank 1 (fake 1) failed in forward of step 3: ValueError: scripted" in shown
    assert kernel.run("1 + 2")["text"] == "3"
    kernel.run("run = lab.train(plan.with_({'name': 'raise-1'}))")
    seen = kernel.run("run.wait()")
    assert seen["error"][0].startswith("RunFailed: run ")
    assert kernel.run("1 + 3")["text"] == "4"


def test_a_restarted_kernel_finds_lab_and_run(free_lab, kernel, lab):
    run_dir = kernel.run("run = lab.train(plan); run.wait(step=2, progress=False); print(run.dir)")["text"].strip()
    kernel.restart()
    found = kernel.run("import mmlab; lab = mmlab.Lab.attach(); run = lab.run; print(run.dir, run.status()['state'])")
    assert found["text"].split() == [run_dir, "running"]
    assert kernel.run("print(run.pause().wait().ok)")["text"] == "True\n"
    kernel.run(SETUP.format(lab=lab.id))


def test_a_lab_made_in_a_kernel_outlives_it(lab, kernel):
    made = kernel.run("other = mmlab.Lab(engines=1, worker='fake_worker'); print(other.id, other._paths.config)")
    other, config = made["text"].split()
    assert read_json(Path(config))["owner"] is None
    assert kernel.run("other.close(); print(other.status()['state'])")["text"] == "ended\n"
    assert not Path(config).exists()
    assert other != lab.id
