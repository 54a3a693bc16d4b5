"""Tiles, shares and buckets in live runs: exact over restores, told of, refused where a position does not fit."""

import pytest
from live import LiveRun, make_plan

from mmlab.messages.runs import create_run
from mmlab.tracking import RunRecord

ALL = {
    "model.vision.image_size": 32, "data.max_tiles": 6, "data.text_share": 0.25, "data.shuffle_window": 10,
    "data.bucket_window": 36, "data.token_budget": 150, "data.global_batch": 12, "parallel.dp": 2, "parallel.pp": 1,
    "parallel.vision_dp": 2, "parallel.microbatches": 2, "train.eval_samples": 12,
}  # fmt: skip


@pytest.mark.slow
def test_tiles_in_buckets_resume_inside_a_window_and_are_told_of(pool, shaped_shards, tmp_path):
    """Everything at once, and evaluation with pictures of several tiles, some of them of later turns."""
    changes = ALL | {"data.held_out": str(shaped_shards), "train.eval_every": 2, "train.sample_images": 3}
    plan = make_plan(shaped_shards, changes, "train.steps=6")
    assert not plan.check()
    paths = create_run(tmp_path, plan.name, plan.dumps(), plan.world_size, plan.train.steps)
    run, record = LiveRun(pool, plan, paths.root, paused=True), RunRecord(paths.root)
    run.do("step", n=2)
    run.wait_step(2)
    run.do("checkpoint", name="two")  # 24 samples: two steps into the window
    run.do("step", n=3)
    run.wait_step(5)
    first = run.losses()
    run.do("restore", name="two")
    run.do("resume")
    run.join()
    assert {step: run.losses()[step] for step in (3, 4, 5)} == {step: first[step] for step in (3, 4, 5)}
    ledger = record.ledger()
    assert ledger.ok, ledger.problems
    assert "within windows of 36 samples" in str(ledger)
    assert "source 1 (text), epoch 0: " in str(ledger)
    used = [sum(epoch.used for epoch in ledger.epochs if epoch.source == source) for source in (0, 1)]
    assert used == [54, 18]  # pictures and text
    assert all(record.ledger().samples(step) for step in range(1, 7))

    events = run.events()
    told = [event["balance"] for event in events if event["kind"] == "step"]
    before = [entry["unbucketed"] for entry in told]
    assert sum(entry["tokens"] for entry in told) < sum(entry["tokens"] for entry in before)
    assert all(1 <= entry["images"] < 2 for entry in (*told, *before))
    assert "without data.bucket_window" in str(record.bottleneck())
    assert [event for event in events if event["kind"] == "eval"]
    assert all(len(event["items"]) == 3 for event in events if event["kind"] == "samples")

    other = plan.with_("data.bucket_window=24")
    other.save(run.paths.plan)
    refused = LiveRun(pool, other, run.paths.root, generation=2, restore="two")
    refused.join()
    last = refused.events("state")[-1]
    assert last["state"] == "failed"
    assert "data.bucket_window = 24: the saved position is 24 samples into a bucket window" in last["reason"]
    begun = {event["id"] for event in refused.events("lineage")}
    assert begun == {
        event["id"] for event in events if event["kind"] == "lineage"
    }  # refused before anything was loaded


@pytest.mark.slow
def test_every_layout_has_the_same_steps_and_losses(pool, shaped_shards, tmp_path):
    found = []
    for number, layout in enumerate(({"parallel.dp": 1}, {"parallel.dp": 2, "data.workers": 1}, {"parallel.dp": 3})):
        plan = make_plan(shaped_shards, ALL | {"parallel.microbatches": 1} | layout, "train.steps=4",
                         "data.token_budget=0")  # fmt: skip
        paths = create_run(tmp_path / str(number), plan.name, plan.dumps(), plan.world_size, plan.train.steps)
        run = LiveRun(pool, plan, paths.root)
        run.join()
        ledger = RunRecord(paths.root).ledger()
        assert ledger.ok, ledger.problems
        found.append((ledger.steps, run.losses()))
    for steps, losses in found[1:]:
        assert steps == found[0][0]
        assert losses == pytest.approx(found[0][1], rel=1e-5)
