"""Checkpoints on real engines: compared, named, restored in another layout live and ended, branched off, deleted."""

import pytest
from lab_helpers import assert_ended, eventually, processes
from test_training import shard  # noqa: F401  a fixture

from mmlab import Plan
from mmlab.errors import CheckpointError, LabError
from mmlab.lab import Lab
from mmlab.messages.checkpoints import FROZEN

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def small_lab(place, tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    lab = Lab(engines=3)
    yield lab
    pids = processes(lab)
    lab.close()
    assert_ended(pids)


@pytest.fixture
def run(small_lab, shard):  # noqa: F811
    changes = {"data.path": str(shard), "data.held_out": "", "train.steps": 100000, "data.lanes": 2}
    changes |= {"train.vision.frozen": True, "checkpoint.every_steps": 0}
    run = small_lab.train(Plan.preset("laptop").with_("parallel.pp=1", changes))
    run.wait(step=2, timeout=100)
    return run


def test_from_a_checkpoint_to_a_branch(small_lab, run):
    run.checkpoint("early").wait()
    run.wait(step=run.status()["step"] + 2, timeout=100)
    run.checkpoint("late").wait()
    early = run.checkpoint_info("early")
    assert (early["frozen"], early["problem"], early["layout"]) == (["vision"], "", "2 ranks")
    ack = run.restore(name="early", plan="parallel.tp=2").wait(150)
    assert f"restored early (step {early['step']}); another layout (2 -> 3 ranks)" in ack.message
    eventually(lambda: run.status()["generation"] == 2 and run.status()["state"] == "running", 100)
    run.wait(step=early["step"] + 2, timeout=100)
    assert run.plan.parallel.tp == 2
    run.checkpoint("wide").wait()
    _they_are_compared(run)
    dropped, branch = (_queued(run, early) for _ in range(2))
    assert branch.status()["reason"].endswith(f" and of run {dropped.id}")
    assert small_lab.run.dir == branch.dir
    assert small_lab.current.dir == Lab._of(small_lab._paths).current.dir == run.dir
    assert list(small_lab.view.targets) == [rank["engine"] for rank in run.status()["ranks"]]
    dropped.stop()
    dropped.wait(timeout=60)
    assert (dropped.status()["state"], dropped.status()["reason"]) == ("stopped", "stopped before it started")
    with pytest.raises(LabError, match="is busy with run"):
        small_lab.train(run.plan)
    run.stop().wait()
    run.wait(timeout=100)
    branch.wait(timeout=100)
    assert [row["step"] for row in branch.metrics()] == [early["step"] + 1]
    assert run.ledger().ok
    _another_layout_after_the_end(run)
    _a_branch(small_lab, run, early)


def _queued(run, early):
    branch = run.branch(f"train.steps={early['step'] + 1}", name="early")
    assert branch.status()["state"] == "queued"
    assert branch.status()["reason"].startswith(f"waits for the end of run {run.id}")
    return branch


def _they_are_compared(run):
    found = run.compare("early", "wide")
    changes = {m["module"]: m["change"] for m in found.modules}
    assert changes["vision"] == 0.0
    assert found.modules[0]["same"]
    assert all(0 < changes[module] < 1 for module in ("projector", "language"))
    assert [change.key for change in found.plan] == ["parallel.tp"]


def _another_layout_after_the_end(run):
    step = run.checkpoint_info("late")["step"]
    run.rename_checkpoint("late", "later")
    generation = run.status()["generation"]
    run.restore(name="later", plan=["parallel.tp=1", "train.language.lr=1e-5"])
    run.wait(step=step + 2, timeout=100)
    status = run.status()
    assert (status["generation"], len(status["ranks"])) == (generation + 1, 2)
    assert run.metrics()[-1]["lr"]["language"] == pytest.approx(1e-5)
    (moved,) = [event for event in run.events() if event["kind"] == "relayout" and event["through"] == "disk"]
    assert moved["changes"]["parallel.tp"] == [2, 1]
    with pytest.raises(CheckpointError, match="would recover"):
        run.delete_checkpoint("later")
    run.stop().wait()
    run.wait(timeout=100)
    assert run.ledger().ok


def _a_branch(lab, run, early):
    kept = run._record.paths.checkpoints
    steps = early["step"] + 3
    branch = run.branch("parallel.tp=2", "train.language.lr=5e-5", f"train.steps={steps}", name="early")
    assert branch.id in [each["run"] for each in run.branches()]
    for row in run.checkpoints():
        run.delete_checkpoint(row["name"])  # the branch has what it needs
    assert list((kept / FROZEN).iterdir()) == []
    branch.wait(timeout=100)
    assert branch.status()["state"] == "finished"
    assert [row["step"] for row in branch.metrics()] == list(range(early["step"] + 1, steps + 1))
    (began,) = [event for event in branch.events() if event["kind"] == "restore"]
    assert began["values"]["train.language.lr"] == 5e-5  # the branch's, not the checkpoint's
    assert branch.ledger().ok
    assert branch.checkpoint_info("early")["origin"] == f"{run.id}, early"
