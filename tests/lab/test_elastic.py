"""A run that loses an engine for a while: fewer ranks meanwhile, then all of them again."""

import os
from pathlib import Path

import pytest
from lab_helpers import assert_ended, eventually, processes

from mmlab import Plan
from mmlab.lab import Lab

pytestmark = [pytest.mark.slow, pytest.mark.timeout(500)]
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def switch(tmp_path_factory):
    """A file: while it exists, no engine can be started."""
    return tmp_path_factory.mktemp("elastic") / "no-engines"


@pytest.fixture(scope="module")
def lab(place, switch):
    """Three engines."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_RUNTIME_DIR", str(switch.parent / "runtime"))
        patch.setenv("MMLAB_TEST_NO_ENGINES", str(switch))
        patch.setenv("PYTHONPATH", os.pathsep.join([str(HERE / "no_engines"), os.environ["PYTHONPATH"]]))
        lab = Lab(engines=3).wait(timeout=90)
        yield lab
        pids = processes(lab)
        lab.close()
        assert_ended(pids)


@pytest.fixture(autouse=True)
def _engines_can_be_started(switch):
    switch.unlink(missing_ok=True)
    yield
    switch.unlink(missing_ok=True)


def ranks(run):
    """How many ranks are at work."""
    status = run.status()
    return len(status["ranks"]) if status["state"] in ("running", "paused") else 0


def test_fewer_ranks_while_an_engine_is_lacking_then_all_again(lab, switch):
    changes = {
        "data.path": "shapes", "data.held_out": "", "data.global_batch": 4, "data.lanes": 2, "train.steps": 100000,
        "checkpoint.every_steps": 5, "cluster.elastic": True, "cluster.start_timeout": 10.0,
    }  # fmt: skip
    plan = Plan.preset("laptop").with_("parallel.dp=2", "parallel.pp=1", "parallel.microbatches=1", changes)
    assert plan.world_size == 3
    run = lab.train(plan)
    run.wait(step=7, timeout=100, progress=False)
    switch.touch()
    survivors = {rank["pid"] for rank in run.status()["ranks"]} - {run.status()["ranks"][2]["pid"]}
    run.chaos(kill=2)
    eventually(lambda: ranks(run) == 2, timeout=100)
    assert {rank["pid"] for rank in run.status()["ranks"]} == survivors
    assert (run.plan.parallel.dp, run.plan.parallel.microbatches) == (1, 2)
    shrunk = run.status()["step"]
    run.wait(step=shrunk + 3, timeout=60, progress=False)
    run.pause().wait()
    switch.unlink()
    eventually(lambda: ranks(run) == 3 and run.status()["state"] == "paused", timeout=150)
    assert run.plan == plan
    step = run.step(3).wait().step + 3
    run.wait(step=step, timeout=60, progress=False)
    run.stop()
    run.wait(timeout=60, progress=False)
    assert run.ledger().ok, run.ledger().problems
    assert [row["step"] for row in run.metrics()] == list(range(1, step + 1))
    moves = [event for event in run.events() if event["kind"] == "relayout"]
    assert [(move["before"], move["after"], move["through"]) for move in moves] == [(3, 2, "disk"), (2, 3, "memory")]
    assert moves[0]["changes"] == {"parallel.dp": [2, 1], "parallel.microbatches": [1, 2]}
    whole = lab.train(plan)
    whole.wait(step=step, timeout=100, progress=False)
    whole.stop()
    whole.wait(timeout=60, progress=False)
    pairs = list(zip(run.metrics(), whole.metrics(), strict=False))
    assert max(abs(a["loss"] - b["loss"]) / abs(b["loss"]) for a, b in pairs) < 1e-5
    assert all(whole.ledger().steps[number] == places for number, places in run.ledger().steps.items())


def test_a_layout_without_a_smaller_one_waits_or_fails_with_the_reason(lab, switch):
    changes = {"data.path": "shapes", "data.held_out": "", "cluster.elastic": True, "cluster.start_timeout": 6.0}
    run = lab.train(Plan.preset("laptop").with_("parallel.pp=2", "train.steps=100000", changes))
    run.wait(step=2, timeout=100, progress=False)
    switch.touch()
    run.chaos(kill=1)
    eventually(lambda: run.status()["state"] == "failed", timeout=100)
    assert "did not start within 6 s" in run.status()["reason"] or "came within 6 s" in run.status()["reason"]
