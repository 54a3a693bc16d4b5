"""A run that is stuck: the doctor says who holds it up, an abort frees the ranks, the same processes train again."""

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from live import LiveRun, make_plan

from mmlab.cluster.verify import verify
from mmlab.messages import Failure, RunPaths, read_beacons, read_events, write_json
from mmlab.plan import Plan
from mmlab.tracking.doctor import diagnose
from mmlab.tracking.record import RunRecord
from mmlab.train import control

PLANS = Path(__file__).parents[1] / "plans"
HANG = ("hang", 2, 3, "backward")


def stuck_run(pool, plan, folder, fault):
    """A run whose rank is in its fault, and its record."""
    _, rank, step, phase = fault
    run = LiveRun(pool, plan, folder, fault=fault)
    write_json(run.paths.run, {"id": "run", "generation": 1, "world_size": plan.world_size, "steps": 9})
    run.wait_for(lambda: [b for b in read_beacons(run.paths.ranks) if (b.rank, b.step, b.phase) == (rank, step, phase)])
    return run, RunRecord(folder)


def seen(record, condition):
    """The first diagnosis that satisfies a condition: ranks need a moment until all wait."""
    end = time.monotonic() + 60
    while not condition(found := diagnose(record)):
        assert time.monotonic() < end, found.text
        time.sleep(0.1)
    return found


def abort(run):
    """Abort: the ranks' last states. Nothing else would free them: a group waits for six hours."""
    ack = run.do("abort", generation=1)
    assert ack.ok, ack.message
    states = run.join()
    ended = [e for e in run.events("state") if e["state"] == "stopped"]
    assert len(ended) == 1
    assert ended[0]["reason"].startswith("aborted (test); rank ")
    return states


@pytest.mark.parametrize("collectives", ["shm", "gloo"])
def test_the_doctor_names_the_rank_that_hangs_and_an_abort_frees_all(pool, shards, tmp_path, collectives):
    plan = make_plan(shards, f"cluster.collectives={collectives}", "train.steps=100000")
    run, record = stuck_run(pool, plan, tmp_path / "run", HANG)
    found = seen(record, lambda d: d.missing == [2] and len(d.waits) >= 2)
    calls = {(w.op, w.group, w.missing) for w in found.waits}
    assert ("recv", "backward", (2,)) in calls  # the stage before waits for the gradient of its output
    (wait,) = [w for w in found.waits if w.rank == 1]
    assert wait.shape == (wait.shape[0], plan.model.language.hidden)
    assert "train_functions.py" in found.ranks[2].where
    assert found.ranks[2].where.endswith(" in fault")
    assert "mmlab/parallel/exchange.py" in found.ranks[1].where
    for text in ("rank 2 (stage 1 tp 0)", "backward of step 3", "train_functions.py", "run.abort()"):
        assert text in found.text
        assert text in found._repr_html_()
    assert abort(run) == ["stopped"] * 3
    assert not list((run.paths.failures / "generation-1").glob("rank-*.json"))
    assert RunRecord(tmp_path / "run").status()["state"] == "stopped"
    again = LiveRun(pool, make_plan(shards, "train.steps=2"), tmp_path / "again")  # the same processes
    assert again.join() == ["finished"] * 3


@pytest.mark.parametrize("collectives", ["shm", "gloo"])
def test_a_collective_that_one_rank_has_not_joined_is_named(pool, shards, tmp_path, collectives):
    plan = make_plan(shards, f"cluster.collectives={collectives}", "train.steps=100000")
    run, record = stuck_run(pool, plan, tmp_path / "run", ("hang", 0, 3, "reduce"))
    found = seen(record, lambda d: d.missing == [0] and {w.rank for w in d.waits if w.op == "all_reduce"} == {1, 2})
    wait = next(w for w in found.waits if w.op == "all_reduce")
    assert (wait.group, wait.members, wait.missing) == ("control", (0, 1, 2), (0,))
    assert wait.number > 3
    assert f"rank 0 (vision 0) has not joined {wait.call}, where ranks 1, 2 wait" in found.text
    assert abort(run) == ["stopped"] * 3


@pytest.mark.slow
def test_a_stopped_process_and_one_whose_interpreter_is_blocked_are_shown(pool, shards, tmp_path):
    plan = make_plan(shards, "train.steps=100000")
    run, record = stuck_run(pool, plan, tmp_path / "run", ("hold", 2, 3, "forward"))
    seen(record, lambda d: len(d.ranks) == 3 and d.ranks[2].where.endswith(" in fault"))  # by the signal handler
    run.wait_step(3)
    os.kill(pool.pids[1], signal.SIGSTOP)
    try:
        found = seen(record, lambda d: d.ranks[1].process == "stopped" and 1 in d.missing and d.waits)
        assert "its process is stopped (SIGSTOP)" in found.text
    finally:
        os.kill(pool.pids[1], signal.SIGCONT)
    assert abort(run) == ["stopped"] * 3


def test_an_abort_during_a_pause_and_one_of_an_earlier_generation(pool, shards, tmp_path):
    run = LiveRun(pool, make_plan(shards, "train.steps=100000"), tmp_path / "run")
    assert run.do("pause").ok
    late = run.do("abort", generation=0)
    assert not late.ok
    assert "earlier generation" in late.message
    assert abort(run) == ["stopped"] * 3


def test_a_control_thread_that_was_held_up_cuts_nothing_of_the_next_generation(tmp_path, monkeypatch):
    paths, reading, read, cut = RunPaths(tmp_path), threading.Event(), threading.Event(), []
    paths.create()

    def slowly(failures, generation):
        reading.set()
        assert read.wait(60)
        return [Failure(1, "stage 0", "forward", 3, "exception", "scripted")]

    monkeypatch.setattr(control, "read_failures", slowly)
    listener = control.Listener(paths, 0, 1, SimpleNamespace(cut=lambda: cut.append(1)))
    assert reading.wait(60)
    listener._stop.set()  # what `close` does, before it waits for two seconds
    read.set()
    listener._thread.join(60)
    assert not cut


@pytest.mark.slow
def test_an_abort_that_comes_too_late_changes_no_end(pool, shards, tmp_path):
    plan = make_plan(shards, "train.steps=1")
    paths = RunPaths(tmp_path)
    paths.create()
    plan.save(paths.plan)
    pool.grow(3)
    assert pool.run("train_functions:aborted_at_the_end", str(tmp_path), ranks=3) == ["finished"] * 3
    assert [e["state"] for e in read_events(paths.events)[0] if e["kind"] == "state"][-1] == "finished"


@pytest.mark.slow
def test_after_an_abort_inside_backward_under_zero3_the_same_processes_are_exact(pool, shards, tmp_path):
    plan = Plan.load(str(PLANS / "zero3-tensor.toml")).with_({"data.path": str(shards), "data.held_out": ""})
    pool.grow(plan.world_size)
    last = plan.world_size - 1
    run, record = stuck_run(pool, plan.with_("train.steps=1000"), tmp_path / "run", ("hang", last, 2, "backward"))
    seen(record, lambda d: d.missing == [last] and d.waits)
    pids = pool.pids
    assert set(abort(run)) == {"stopped"}
    result = verify(plan, pool=pool)
    assert pool.pids == pids
    assert result["ok"], result
    assert max(result["max_rel_grad"], result["max_rel_param"]) <= 1e-9
