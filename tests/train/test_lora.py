"""LoRA in a whole run: from a base checkpoint, through checkpoints of another layout, out as merged weights."""

import shutil

import pytest
from live import LiveRun, make_plan

from mmlab import Run
from mmlab.messages import write_json

LORA = ("train.language.lora_rank=4", "train.language.lora_targets=q_proj,down_proj", "train.vision.lora_rank=2")


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_adapters_start_on_a_base_checkpoint_and_leave_merged(pool, shards, tmp_path):
    data, saved = f"data.held_out='{shards}'", ("checkpoint.every_steps=3", "checkpoint.at_end=true")
    base = LiveRun(pool, make_plan(shards, *saved, "train.steps=2"), tmp_path / "base")
    base.join()
    shutil.copytree(base.paths.checkpoints, tmp_path / "lora" / "checkpoints")
    tensor = ("parallel.tp=2", "parallel.pp=1", "train.steps=5")
    run = LiveRun(pool, make_plan(shards, data, *LORA, *tensor, *saved), tmp_path / "lora", restore="latest")
    assert run.join() == ["finished"] * 3
    assert [e["step"] for e in run.events("step")] == [3, 4, 5]

    # Another layout goes on from step 3 as this one did.
    shutil.copytree(run.paths.checkpoints, tmp_path / "other" / "checkpoints")
    plan = make_plan(shards, data, *LORA, "train.steps=5", "parallel.microbatches=2")
    (third,) = (path.name for path in run.paths.checkpoints.glob("step-000003*"))
    other = LiveRun(pool, plan, tmp_path / "other", restore=third)
    other.join()
    for step in (4, 5):
        assert other.losses()[step] == pytest.approx(run.losses()[step], rel=1e-4)

    # Without the adapters, or with another scale, the checkpoint is of another model.
    for changes, message in (((), "train.language.lora_rank"), ((*LORA, "train.vision.lora_alpha=2"), "lora_alpha")):
        folder = tmp_path / f"refused-{len(changes)}"
        shutil.copytree(run.paths.checkpoints, folder / "checkpoints")
        refused = LiveRun(pool, make_plan(shards, "train.steps=9", *changes), folder, restore="latest")
        refused.join()
        assert message in refused.events("state")[-1]["reason"]

    write_json(run.paths.run, {"id": "run"})
    Run(run.paths.root).export(tmp_path / "merged")
    files = Run(run.paths.root).export(tmp_path / "adapters", adapters=True)
    assert len(files) == 4
    changes = {f"train.{m}.init_from": str(tmp_path / "merged" / m) for m in ("vision", "projector", "language")}
    still = {f"train.{m}.lr": 0.0 for m in ("vision", "projector", "language")}
    again = LiveRun(pool, make_plan(shards, data, changes, still, "train.steps=1"), tmp_path / "again")
    again.join()
    assert again.events("eval")[0]["loss"] == pytest.approx(run.events("eval")[0]["loss"], rel=1e-5)
