"""Runs whose evaluation, checkpoints and features do not depend on where the encoder is."""

import pytest
from live import LiveRun

from mmlab.plan import Plan


def make_plan(data, *changes, preset="laptop"):
    base = {
        "data.path": str(data),
        "data.held_out": "",
        "train.steps": 8,
        "checkpoint.every_steps": 0,
        "checkpoint.at_end": False,
    }
    return Plan.load(preset).with_(base, *changes)


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


def test_evaluation_does_not_depend_on_the_layout(pool, shards, tmp_path):
    """Held-out losses and greedy answers of one set of weights are the same however the model is split."""
    found = []
    for number, changes in enumerate(LAYOUTS):
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
