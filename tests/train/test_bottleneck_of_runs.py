"""Ranks that are made slow in one phase: the run says so."""

import pytest
from live import LiveRun, make_plan

from mmlab.cli import run_command
from mmlab.messages.runs import create_run
from mmlab.tracking import RunRecord


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.parametrize(
    ("rank", "phase", "cause"),
    [
        (0, "data", "data"),
        (0, "encode", "encoder"),
        (1, "optimizer", "optimizer"),
    ],
)
def test_a_slow_rank_is_found_by_its_phase(pool, shards, tmp_path, capfd, rank, phase, cause):
    plan = make_plan(shards, "train.steps=8")
    paths = create_run(tmp_path, plan.name, plan.dumps(), plan.world_size, plan.train.steps)
    LiveRun(pool, plan, paths.root, fault=("drag", rank, 1, phase)).join()
    found = RunRecord(paths.root).bottleneck()
    assert found.cause == cause, str(found)
    assert found.waits[0].seconds > 0.08
    assert run_command(["diagnose", str(paths.root)]) == 0
    assert found.sentence in capfd.readouterr().out
