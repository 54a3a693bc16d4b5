"""Schedules beyond 1F1B in whole runs: what they train, save, evaluate and trace is what 1F1B does."""

import json

import pytest
from live import LiveRun

from mmlab.plan import Plan
from mmlab.plan.ops import PASSES


def make_plan(data, schedule):
    return Plan.load("laptop").with_(
        {
            "data.path": str(data),
            "data.held_out": str(data),
            "data.global_batch": 8,
            "train.steps": 4,
            "train.vision.lr": 0.01,
            "parallel.schedule": schedule,
            "parallel.microbatches": 4,
            "checkpoint.every_steps": 2,
            "tracking.trace_every": 2,
        }
    )


@pytest.mark.parametrize(
    "schedule", ["zb_v", *(pytest.param(name, marks=pytest.mark.slow) for name in ("interleaved", "zb_h1"))]
)
def test_1f1b_goes_on_from_what_another_schedule_saved_and_evaluates_alike(pool, shards, tmp_path, schedule):
    plan = make_plan(shards, schedule)
    run = LiveRun(pool, plan, tmp_path / "run")
    assert set(run.join()) == {"finished"}
    evaluation, samples = run.events("eval")[-1], run.events("samples")[-1]
    make_plan(shards, "1f1b").save(run.paths.plan)
    name = min(path.name for path in run.paths.checkpoints.glob("step-*"))
    again = LiveRun(pool, make_plan(shards, "1f1b"), tmp_path / "run", generation=2, restore=name)
    assert set(again.join()) == {"finished"}
    lineage = again.events("lineage")[-1]["id"]
    before = {e["step"]: e["loss"] for e in again.events("step") if e["lineage"] != lineage}
    after = {e["step"]: e["loss"] for e in again.events("step") if e["lineage"] == lineage}
    assert sorted(after) == [3, 4]
    assert after == pytest.approx({step: before[step] for step in after}, rel=1e-5)
    once_more = again.events("eval")[-1]
    assert once_more["loss"] == pytest.approx(evaluation["loss"], rel=1e-4)
    assert once_more["loss_swapped"] == pytest.approx(evaluation["loss_swapped"], rel=1e-4)
    answers = [item["text"] for item in samples["items"]]
    assert [item["text"] for item in again.events("samples")[-1]["items"]] == answers
    assert any(answers)


def test_a_trace_names_the_chunk_of_each_pass(pool, shards, tmp_path):
    plan = make_plan(shards, "zb_v").with_("train.steps=2", "data.held_out=''", "checkpoint.every_steps=0")
    run = LiveRun(pool, plan, tmp_path / "run")
    run.join()
    planned = plan.schedule().ops
    for rank in (1, 2):
        (trace,) = [json.loads(line) for line in (run.paths.traces / f"rank-{rank}.jsonl").read_text().splitlines()]
        done = [(kind, i, chunk) for kind, i, _, _, chunk in trace["ops"] if kind in PASSES]
        assert done == [(op.kind, op.microbatch, op.chunk) for op in planned[rank] if op.kind in PASSES]
        assert {chunk for _, _, chunk in done} == {0, 1}


def test_a_measured_split_is_decided_once_and_stands_in_the_plan(pool, shards, tmp_path):
    plan = make_plan(shards, "1f1b").with_("parallel.balance=measured", "data.held_out=''", "model.language.layers=6")
    assert plan.parallel.undecided
    run = LiveRun(pool, plan, tmp_path / "run")
    assert set(run.join()) == {"finished"}
    (measured,) = run.events("balance")
    settled = Plan.load(run.paths.plan)
    split = list(settled.parallel.layers_per_stage)
    assert split == measured["layers_per_stage"]
    assert sum(split) == 6
    assert max(measured["seconds"]) <= max(measured["even"])
    assert min(measured["times"][part] for part in ("block", "embedding", "head")) > 0
    name = min(path.name for path in run.paths.checkpoints.glob("step-*"))
    again = LiveRun(pool, settled, tmp_path / "run", generation=2, restore=name)
    again.join()
    assert len(again.events("balance")) == 1, "a later generation keeps what was decided"
    assert Plan.load(run.paths.plan) == settled
