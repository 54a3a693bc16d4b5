"""Compression changed and measured while a run goes on: on one step by all ranks, in the log, replayed bit for bit."""

import math

import pytest
from live import LiveRun, make_plan
from typer.testing import CliRunner

from mmlab.cli import build_app
from mmlab.errors import MmlabError, PlanError
from mmlab.lab import Run
from mmlab.messages import new_command, send
from mmlab.messages.runs import create_run
from mmlab.plan.compression import live_values
from mmlab.plan.schema import MODULES

PLAIN = ("parallel.vision=first_stage", "parallel.vision_dp=0", "parallel.pp=1", "parallel.dp=2")
"""Two ranks with the whole model: all gradients are reduced over both."""


def begun(pool, shards, folder):
    """A run that is paused before its first step, as a test's ranks have it and as a person steers it."""
    plan = make_plan(shards, *PLAIN, "train.steps=1000")
    paths = create_run(folder, plan.name, plan.dumps(), plan.world_size, plan.train.steps)
    send(paths.control, new_command("pause"))
    return LiveRun(pool, plan, paths.root), Run.open(paths.root)


def go(live, run, steps):
    """Some steps, then a pause again."""
    until = run.status()["step"] + steps
    run.step(steps).wait()
    live.wait_for(lambda: live.events("state")[-1]["state"] == "paused" and live.events("step")[-1]["step"] == until)


def steered(live, run):
    """Dense; top-k, measured once; powersgd for the language model alone, measured; back with residuals kept."""
    go(live, run, 1)
    with pytest.raises(MmlabError, match="no gradients are compressed in step 2"):
        run.measure_compression().wait()
    run.compress("all", "topk", ratio=0.05).wait()
    go(live, run, 1)
    run.measure_compression().wait()
    go(live, run, 2)
    run.compress("language", "onebit").wait()
    run.measure_compression().wait()
    go(live, run, 1)
    shown = run.compression()
    run.compress("all", "none", residual="keep").wait()
    go(live, run, 1)
    return shown


def replayed(live, run, log):
    """Give the commands of a log again, each after the step after which it was applied."""
    for event in log:
        missing = event["step"] - run.status()["step"]
        if missing:
            go(live, run, missing)
        if event["verb"] in ("set", "measure"):
            assert live.do(event["verb"], **event["args"]).ok == event["ok"]


def test_compressors_change_between_steps_and_the_log_replays(pool, shards, tmp_path):
    live, run = begun(pool, shards, tmp_path / "a")
    shown = steered(live, run)
    with pytest.raises(PlanError, match="topk has no option rank"):
        run.compress("vision", "topk", rank=2)
    assert run._record.live_plan().communication.language.residual == "keep"
    ended = CliRunner().invoke(build_app(), ["compression", str(run.dir), "--measure"])
    assert "no gradients are compressed" in str(ended.exception)
    run.stop().wait()
    live.join()
    steps = live.events("step")
    coded = [{m: c["compressor"] for m, c in step.get("compression", {}).items()} for step in steps]
    topk, mixed = dict.fromkeys(MODULES, "topk"), {"vision": "topk", "projector": "topk", "language": "onebit"}
    assert coded == [{}, topk, topk, topk, mixed, dict.fromkeys(MODULES, "none")]
    measured = [{m for m, c in step.get("compression", {}).items() if "error" in c} for step in steps]
    assert measured == [set(), set(), set(MODULES), set(), set(MODULES), set()]
    _check_numbers(steps, shown)
    again, other = begun(pool, shards, tmp_path / "b")
    replayed(again, other, live.events("command"))
    other.stop().wait()
    again.join()
    assert again.losses() == live.losses()
    assert len(set(live.losses().values())) == 6


def _check_numbers(steps, shown):
    """Bytes without compression are those that the dense step counted; residuals wait; the table is the last step."""
    for m in MODULES:
        found = [step["compression"][m] for step in steps[1:]]
        assert {c["dense"] for c in found} == {sum(steps[0]["traffic"][m])} == {sum(steps[-1]["traffic"][m])}
        assert all(c["residual"] > 0 and c["kept"] == c["dense"] for c in found)
        assert found[-1]["residual"] == found[-2]["residual"]
        assert all(0 < c["error"] < 10 for c in found if "error" in c)
    rows = {row.module: row for row in shown.rows}
    assert rows["vision"].options == {"ratio": 0.05, "error_feedback": True}
    assert rows["vision"].ratio == pytest.approx(10, rel=0.1)  # 8 of 4 bytes for one in twenty
    assert rows["language"].ratio == pytest.approx(31, rel=0.1)
    assert (rows["vision"].error_step, rows["language"].error_step) == (5, 5)
    assert rows["language"].bytes == sum(steps[4]["traffic"]["language"])
    assert shown.norms is not None


@pytest.mark.slow
def test_the_command_line_measures_a_run_that_goes_on(pool, shards, tmp_path):
    live, run = begun(pool, shards, tmp_path)
    run.compress("vision", "int8").wait()
    paused = CliRunner().invoke(build_app(), ["compression", str(run.dir), "--measure"])
    assert "it is measured in its next step" in paused.output
    go(live, run, 1)
    assert "step 1" in str(run.compression())
    run.resume().wait()
    shown = CliRunner().invoke(build_app(), ["compression", str(run.dir), "--measure"])
    assert shown.exit_code == 0
    assert "is also reduced without" in shown.output
    assert "int8" in shown.output
    run.stop().wait()
    live.join()
    assert run.compression().rows[0].error < 0.05


CYCLE = [
    live_values("all", "topk", {"ratio": 0.05}),
    live_values("all", "none", {"residual": "keep"}),
    live_values("language", "powersgd", {"rank": 2}),
    live_values("all", "onebit", {"residual": "drop"}),
    live_values("all", "none", {"residual": "flush"}),
]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_hundred_changes_leave_nothing_behind(pool, shards):
    plan = make_plan(shards, *PLAIN, "train.steps=1000", "cluster.collectives=shm")
    pool.grow(2)
    found = pool.run("compress_functions:toggled", plan.dumps(), CYCLE, 20, ranks=2, timeout=240)
    for held, losses in found:
        assert len(set(held[2:])) == 1, held  # the first rounds make what stays: optimizer, connections
        assert all(math.isfinite(loss) for loss in losses)
        assert losses[-1] < losses[0]
    assert found[0][1] == found[1][1]
