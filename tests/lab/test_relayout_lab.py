"""Another layout on real engines: more of them, fewer, and a rank that dies on the way."""

import os
import signal

import pytest
from lab_helpers import assert_ended, eventually, processes
from test_training import shard  # noqa: F401  a fixture

from mmlab import MmlabError, Plan, PlanError
from mmlab.lab import Lab
from mmlab.messages.moves import memory_folders

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]


@pytest.fixture
def two_engines(place, tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    lab = Lab(engines=2)
    yield lab
    pids = processes(lab)
    lab.close()
    assert_ended(pids)


@pytest.fixture
def run(two_engines, shard):  # noqa: F811
    changes = {"data.path": str(shard), "data.held_out": "", "train.steps": 100000, "data.lanes": 2}
    run = two_engines.train(Plan.preset("laptop").with_("parallel.pp=1", changes))
    run.wait(step=2, timeout=100)
    return run


def test_more_engines_then_fewer_then_a_rank_dies(two_engines, run):
    pids = {rank["pid"] for rank in run.status()["ranks"]}
    run.set("train.language.lr", 5e-4).wait()
    ack = run.relayout("parallel.dp=2", "parallel.pp=2").wait(200)
    assert "(2 -> 5 ranks)" in ack.message
    run.wait(step=ack.step + 2, timeout=100)
    status = run.status()
    assert (status["state"], status["generation"], len(status["ranks"])) == ("running", 2, 5)
    assert pids <= {rank["pid"] for rank in status["ranks"]}
    assert run.plan.world_size == 5
    assert run.plan.train.language.lr == 5e-4
    run.pause().wait()
    ack = run.relayout(run.plan.with_("parallel.dp=1", "parallel.tp=2", "parallel.pp=1")).wait()
    eventually(lambda: run.status()["generation"] == 3 and run.status()["state"] == "paused", 100)
    assert [rank["alive"] for rank in run.status()["ranks"]] == [True] * 3
    run.step(2)
    run.wait(step=ack.step + 2, timeout=100)
    run.resume()
    _every_step_once(run)
    with pytest.raises(PlanError, match=r"data\.lanes stays 2"):
        run.relayout("data.lanes=4")
    _a_layout_that_cannot_start(run)
    _a_rank_dies(run)


def _every_step_once(run):
    steps = [row["step"] for row in run.metrics()]  # read once: it goes on meanwhile
    assert steps == list(range(1, len(steps) + 1))
    assert run.ledger().ok


def _a_layout_that_cannot_start(run):
    """The run goes on in the layout before, paused as it was."""
    run.pause().wait()
    step, generation = run.status()["step"], run.status()["generation"]
    run.relayout("cluster.device=cuda").wait()
    eventually(lambda: run.status()["generation"] == generation + 2 and run.status()["state"] == "paused", 90)
    (warning,) = [event["message"] for event in run.events() if event["kind"] == "warning"]
    assert "torch sees 0 GPUs" in warning
    assert run.plan.cluster.device == "auto"
    assert not any(event.get("state") == "failed" for event in run.events())
    run.resume()
    run.wait(step=step + 1, timeout=100)
    assert run.ledger().ok


def _a_rank_dies(run):
    """kill -9 once the state is whole: nothing is lost, wherever the next generation has got to."""
    before = run.status()
    sent = run.relayout("parallel.tp=1")
    eventually(lambda: run._record.paths.move.exists() or run.status()["generation"] > before["generation"])
    os.kill(before["ranks"][1]["pid"], signal.SIGKILL)  # a rank before and after
    step = sent.wait(200).step
    try:
        run.wait(step=step + 1, timeout=100)
    except MmlabError:
        run.restore()
        run.wait(step=step + 1, timeout=100)
    assert run.plan.parallel.tp == 1
    _every_step_once(run)
    assert not run._record.paths.move.exists()
    assert not any(folder.exists() for folder in memory_folders(run._record.paths))
    run.stop()
    run.wait(timeout=100)
