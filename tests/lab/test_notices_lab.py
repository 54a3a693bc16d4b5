"""Engines that are about to be taken away: the run saves, leaves them and goes on elsewhere."""

import os
import signal
import socket
import time

import pytest
from lab_helpers import assert_ended, eventually, processes
from test_training import shard  # noqa: F401  a fixture

from mmlab import Plan
from mmlab.lab import Lab
from mmlab.messages import ENDED
from mmlab.messages.notices import Notice, read_notices, write_notice

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def two_engines(place, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path_factory.mktemp("notices") / "runtime"))
        lab = Lab(engines=2)
        yield lab
        pids = processes(lab)
        lab.close()
        assert_ended(pids)


@pytest.fixture
def run(two_engines, shard):  # noqa: F811
    changes = {"data.path": str(shard), "data.held_out": "", "train.steps": 100000, "data.lanes": 2,
               "checkpoint.every_steps": 0}  # fmt: skip
    run = two_engines.train(Plan.preset("laptop").with_("parallel.pp=1", changes))
    run.wait(step=2, timeout=100)
    yield run
    if run.status()["state"] not in ENDED:
        run.stop()
        run.wait(timeout=60)


def notices(run):
    return [event for event in run.events() if event["kind"] == "notice"]


def whole(run):
    """Every step is there once, and so are its samples."""
    steps = [row["step"] for row in run.metrics()]
    return steps == list(range(1, len(steps) + 1)) and run.ledger().ok


@pytest.mark.parametrize("name", ["SIGTERM", "SIGUSR1"])
def test_a_signalled_engine_is_left_and_replaced(run, name):
    victim, other = (run.status()["ranks"][rank]["pid"] for rank in (1, 0))
    run.pause().wait()
    os.kill(victim, getattr(signal, name))
    (notice,) = eventually(lambda: notices(run))
    assert (notice["source"], notice["ranks"], notice["pid"]) == (name, [1], victim)
    assert notice["saved"] in [c["name"] for c in run.checkpoints()]
    (heard,) = read_notices(run._record.paths)
    assert notice["deadline"] == heard.time + run.plan.cluster.grace
    eventually(lambda: run.status()["generation"] == 2 and run.status()["state"] == "paused", 90)
    pids = {rank["pid"] for rank in run.status()["ranks"]}
    assert other in pids
    assert victim not in pids
    run.resume()
    run.wait(step=notice["step"] + 2, timeout=60)
    assert whole(run)
    assert not any(event.get("state") == "failed" for event in run.events())


def test_a_deadline_too_short_for_a_save_is_said_and_the_run_goes_back(run):
    saved = run.checkpoint("kept").wait()
    run.wait(step=saved.step + 2, timeout=60)
    victim = run.status()["ranks"][0]
    notice = Notice("leave", "chaos", victim["host"], victim["pid"], deadline=time.time() - 1)
    write_notice(run._record.paths, notice)
    (event,) = eventually(lambda: notices(run))
    assert event["saved"] == ""
    assert "too short for a save" in event["message"]
    eventually(lambda: run.status()["generation"] == 2 and run.status()["state"] == "running", 90)
    run.wait(step=saved.step + 1, timeout=60)
    assert victim["pid"] not in {rank["pid"] for rank in run.status()["ranks"]}
    assert whole(run)


def test_advice_saves_and_goes_on_and_a_host_that_goes_takes_its_lab_along(run):
    """The last one here: no test after it has a lab."""
    write_notice(run._record.paths, Notice("advice", "aws", socket.gethostname(), said="rebalance"))
    (advice,) = eventually(lambda: notices(run))
    assert advice["saved"]
    run.wait(step=advice["step"] + 2, timeout=60)
    assert run.status()["generation"] == 1
    write_notice(run._record.paths, Notice("leave", "aws", "elsewhere"))
    (run._record.paths.notices / "0-broken.json").write_text("[")
    write_notice(run._record.paths, Notice("leave", "aws", socket.gethostname(), said="terminate"))
    eventually(lambda: run.status()["state"] == "stopped")
    assert "is about to be taken away (aws): saved step-" in run.status()["reason"]
    last = notices(run)[-1]
    assert last["ranks"] == [0, 1]
    assert max(c["step"] for c in run.checkpoints()) == last["step"]
