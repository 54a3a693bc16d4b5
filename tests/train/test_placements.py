"""Runs whose evaluation, checkpoints and features do not depend on where the encoder is."""

import json

import pytest
from conftest import write_set  # tests/train/conftest.py
from live import LiveRun, make_plan

LAYOUTS = [
    (),
    ("parallel.tp=2", "parallel.vision_dp=2"),
    ("parallel.dp=2", "parallel.pp=1", "parallel.projector=first_stage"),
    ("parallel.pp=3", "parallel.schedule=gpipe", "parallel.microbatches=4"),
    ("parallel.vision=first_stage", "parallel.vision_dp=0", "parallel.pp=1"),
    ("parallel.vision=first_stage", "parallel.vision_dp=0", "parallel.dp=2", "parallel.transfer=all_gather",
     "parallel.tp=2", "parallel.pp=1"),
    ("parallel.vision=all_ranks", "parallel.vision_dp=0", "parallel.tp=2", "parallel.encoder_batch=2",
     "parallel.projector=first_stage"),
    ("parallel.tp=2", "parallel.sp=true", "parallel.cp=2"),
    ("parallel.cp=2", "parallel.cp_scope=image", "parallel.pp=1"),
    ("parallel.cp=2", "parallel.cp_mode=ulysses", "parallel.pp=1", "parallel.dp=2", "parallel.sharding=zero3"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("layouts", [LAYOUTS[:3], LAYOUTS[:1] + LAYOUTS[3:]])
def test_evaluation_does_not_depend_on_the_layout(pool, shards, tmp_path, layouts):
    """Held-out losses and greedy answers of one set of weights are the same however the model is split."""
    found = []
    for number, changes in enumerate(layouts):
        plan = make_plan(shards, f"data.held_out='{shards}'", "train.steps=3", "train.vision.lr=0.01", *changes)
        run = LiveRun(pool, plan, tmp_path / str(number))
        assert set(run.join()) == {"finished"}, (changes, run.events("failed"))
        evaluation, samples = run.events("eval")[0], run.events("samples")[0]
        answers = [(item["truth"], item["text"]) for item in samples["items"]]
        found.append((evaluation["loss"], evaluation["loss_swapped"], answers))
    for loss, swapped, answers in found[1:]:
        assert loss == pytest.approx(found[0][0], rel=1e-4)
        assert swapped == pytest.approx(found[0][1], rel=1e-4)
        assert answers == found[0][2]
    assert any(text for _, text in found[0][2])


FROZEN = {"train.vision.frozen": True, "parallel.vision_dp": 2, "parallel.microbatches": 4}


TOGETHER = ("parallel.projector=first_stage", "parallel.encoder_batch=2")


@pytest.mark.slow
@pytest.mark.parametrize("changes", [(), TOGETHER])
def test_an_encoder_that_works_ahead_changes_no_loss(pool, tmp_path, changes):
    """Bit for bit, with undecodable pictures agreed as before, and with evaluations and commands between the steps."""
    shards = write_set(tmp_path / "shards", 80, 0.2, broken=2)
    held_out = write_set(tmp_path / "held", 40, 0.2)
    losses, evaluations = [], []
    for ahead in (0, 1, 3):
        data = {"data.held_out": str(held_out), "data.max_bad_share": 1.0, "train.eval_every": 3,
                "tracking.trace_every": 1}  # fmt: skip
        plan = make_plan(shards, data, FROZEN, *changes, f"parallel.encoder_ahead={ahead}")
        run = LiveRun(pool, plan, tmp_path / f"run-{ahead}", paused=ahead > 0)
        if ahead:
            run.do("step", n=1)
            run.wait_step(1)
            run.do("set", values={"train.eval_samples": 32})
            run.do("resume")
        assert run.join() == ["finished"] * 4
        losses.append(run.losses())
        evaluations.append([(e["step"], e["loss"]) for e in run.events("eval")])
        assert len(run.events("bad_image")) == 2
        traces = [json.loads(line) for line in (run.paths.traces / "rank-0.jsonl").read_text().splitlines()]
        done = [op for trace in traces for op in trace["ops"]]  # in one step alone its thread may not come to it
        assert any(op[0] == "encode_ahead" and op[1] >= 0 for op in done) == (ahead > 0)
    assert losses[0] == losses[1] == losses[2]
    assert evaluations[0] == evaluations[1] == evaluations[2]


@pytest.mark.parametrize("ahead", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_checkpoints_of_an_encoder_that_works_ahead_are_exact(pool, shards, tmp_path, ahead):
    """Cursors count what was consumed, not what was decoded or encoded: a new process repeats the losses."""
    plan = make_plan(shards, FROZEN, f"parallel.encoder_ahead={ahead}", "checkpoint.every_steps=3", "train.steps=9")
    run = LiveRun(pool, plan, tmp_path / "run")
    assert run.join() == ["finished"] * 4
    before = run.losses()
    name = min(path.name for path in run.paths.checkpoints.glob("step-*"))
    again = LiveRun(pool, plan, tmp_path / "run", generation=2, restore=name)
    assert again.join() == ["finished"] * 4
    assert losses_of_last_lineage(again) == {step: loss for step, loss in before.items() if step > 3}


@pytest.mark.parametrize("ahead", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_live_restore_drops_what_was_encoded_ahead(pool, shards, tmp_path, ahead):
    """The steps after a restore repeat those before it, though features of other steps were in the queue."""
    plan = make_plan(shards, FROZEN, f"parallel.encoder_ahead={ahead}", "train.steps=100000")
    run = LiveRun(pool, plan, tmp_path / "run")
    run.wait_step(2)
    run.do("pause")
    made = run.do("checkpoint", name="before").step
    found = []
    for _ in range(2):
        run.do("step", n=3)
        run.wait_for(
            lambda: run.events("state")[-1]["state"] == "paused" and run.events("step")[-1]["step"] == made + 3
        )
        losses = losses_of_last_lineage(run)
        found.append([losses[made + i] for i in (1, 2, 3)])
        assert run.do("restore", name="before").ok
    run.do("stop")
    run.join()
    assert found[0] == found[1]


def losses_of_last_lineage(run):
    lineage = run.events("lineage")[-1]["id"]
    return {e["step"]: e["loss"] for e in run.events("step") if e["lineage"] == lineage}


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "phase"), [(0, "exchange"), (2, "forward")])
def test_a_failure_while_the_encoder_works_ahead_leaves_ranks_that_train_again(pool, shards, tmp_path, rank, phase):
    """The queue and its thread go with the generation that failed; the next one repeats the losses."""
    plan = make_plan(shards, FROZEN, "parallel.encoder_ahead=2", "checkpoint.every_steps=2")
    whole = LiveRun(pool, plan, tmp_path / "whole")
    assert whole.join() == ["finished"] * 4
    run = LiveRun(pool, plan, tmp_path / "run", fault=("raise", rank, 4, phase))
    assert run.join() == ["failed"] * 4
    names = pool.run("train_functions:threads", ranks=4)
    assert not any("encode-ahead" in name for found in names for name in found)
    again = LiveRun(pool, plan, tmp_path / "run", generation=2, restore="latest")
    assert again.join() == ["finished"] * 4
    found = losses_of_last_lineage(again)
    assert found == {step: loss for step, loss in whole.losses().items() if step in found}
