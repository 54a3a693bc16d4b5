"""Runs under DeepSpeed: the same losses, evaluations and checkpoints as the native engine has."""

import pytest
import train_functions
from live import LiveRun, make_plan

from mmlab.messages import PHASES
from mmlab.models.sharding import parameter_specs
from mmlab.plan.schema import MODULES

MERGED = ("parallel.vision=first_stage", "parallel.vision_dp=0", "parallel.pp=1", "parallel.dp=2")
DEEPSPEED = (*MERGED, "parallel.engine=deepspeed")
SEPARABLE = ("model.language.hidden=256", "model.vision.hidden=64", "model.projector.hidden=96")
"""Sizes between which a persistence threshold fits: no matrix of the decoder is smaller than the encoder's largest."""


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_runs_evaluate_write_and_save_like_native_ones(pool, shards, tmp_path):
    """One after the other in the same processes: every stage, then offload."""
    extra = (f"data.held_out='{shards}'", "train.steps=3", "checkpoint.every_steps=2", "train.sample_images=2")
    cases = {
        "native": MERGED,
        "zero1": (*DEEPSPEED, "parallel.sharding=zero1"),
        "zero2": (*DEEPSPEED, "parallel.sharding=zero2", "offload.mode=optimizer"),
        "zero3": (*DEEPSPEED, "parallel.sharding=zero3", "offload.mode=parameters"),
        "threshold": (*DEEPSPEED, "parallel.sharding=zero3", *SEPARABLE),
        "threshold native": (*MERGED, *SEPARABLE),
    }
    runs = {}
    for name, changes in cases.items():
        runs[name] = LiveRun(pool, make_plan(shards, *changes, *extra), tmp_path / name)
        assert set(runs[name].join()) == {"finished"}
    for name, run in runs.items():
        native = runs["threshold native" if name.startswith("threshold") else "native"]
        assert run.losses() == pytest.approx(native.losses(), rel=1e-5), name
        (found,), (wanted,) = run.events("eval"), native.events("eval")
        assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-4), name
        assert found["loss_swapped"] == pytest.approx(wanted["loss_swapped"], rel=1e-4), name
        texts = [[item["text"] for item in r.events("samples")[0]["items"]] for r in (run, native)]
        assert texts[0] == texts[1], name
        last, wanted = run.events("step")[-1], native.events("step")[-1]
        assert last["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-3), name
        assert last["lr"] == wanted["lr"]
        for phase in ("forward", "backward", "optimizer"):
            assert last["phases"][0][PHASES.index(phase)] > 0
        assert len(list(run.paths.checkpoints.glob("step-*"))) == 1


def continued(pool, run, plan, name, generation):
    """Losses after a restart of a run from one of its checkpoints with another plan."""
    plan.save(run.paths.plan)
    again = LiveRun(pool, plan, run.paths.root, generation=generation, restore=name)
    assert set(again.join()) == {"finished"}
    lineage = again.events("lineage")[-1]["id"]
    return {e["step"]: e["loss"] for e in again.events("step") if e["lineage"] == lineage}


CASES = {
    "zero1": ("parallel.sharding=zero1",),
    "zero2, optimizer offloaded": ("parallel.sharding=zero2", "offload.mode=optimizer"),
    "zero3": ("parallel.sharding=zero3",),
    "zero3 on one rank, all offloaded": ("parallel.sharding=zero3", "parallel.dp=1", "offload.mode=parameters"),
}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_checkpoints_go_from_native_to_every_stage_and_back(pool, shards, tmp_path):
    """Optimizer state included: a continuation that lacked it would be off at its second step."""
    keep = ("checkpoint.every_steps=2", "checkpoint.keep_last=0")
    native = make_plan(shards, *keep)  # encoder on a rank of its own, two stages
    run = LiveRun(pool, native, tmp_path / "run")
    assert set(run.join()) == {"finished"}
    straight = run.losses()
    name = min(p.name for p in run.paths.checkpoints.glob("step-*"))
    for number, changes in enumerate(CASES.values()):
        plan = make_plan(shards, *DEEPSPEED, *changes, *keep)
        before = {p.name for p in run.paths.checkpoints.glob("step-*")}
        went_on = continued(pool, run, plan, name, 2 * number + 2)
        assert went_on == pytest.approx({s: straight[s] for s in went_on}, rel=1e-5), changes
        (saved,) = {p.name for p in run.paths.checkpoints.glob("step-000004-*")} - before
        back = continued(pool, run, native, saved, 2 * number + 3)
        assert list(back) == [5, 6, 7, 8]
        assert back == pytest.approx({s: straight[s] for s in back}, rel=1e-5), changes


@pytest.mark.slow
def test_frozen_modules_come_out_of_a_checkpoint(pool, shards, tmp_path):
    """A frozen encoder inside ZeRO-3 takes its weights from the checkpoint, also in one that is loaded live."""
    run = LiveRun(pool, make_plan(shards, *SEPARABLE, "checkpoint.every_steps=3"), tmp_path / "run")
    assert set(run.join()) == {"finished"}
    name = min(p.name for p in run.paths.checkpoints.glob("step-*"))
    frozen = (*SEPARABLE, "train.vision.frozen=true", "checkpoint.every_steps=100")
    wanted = continued(pool, run, make_plan(shards, *frozen), name, 2)
    plan = make_plan(shards, *DEEPSPEED, "parallel.sharding=zero3", *frozen)
    assert continued(pool, run, plan, name, 3) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("stage", ["zero2", pytest.param("zero3", marks=pytest.mark.slow)])
def test_a_step_that_broke_off_leaves_the_processes_fit_for_another_run(pool, shards, tmp_path, stage):
    """Also between two backwards of a step whose gradients are reduced once."""
    plan = make_plan(shards, *DEEPSPEED, f"parallel.sharding={stage}", "parallel.microbatches=2", "train.steps=100000")
    run = LiveRun(pool, plan, tmp_path / "run", fault=("raise", 1, 2, "backward"))
    assert run.join() == ["failed"] * 2
    (failed,) = [e for e in run.events("state") if e["state"] == "failed"]
    assert (failed["rank"], failed["phase"], failed["step"]) == (1, "backward", 2)
    losses = {}
    for name, changes in {"deepspeed": (*DEEPSPEED, f"parallel.sharding={stage}"), "native": MERGED}.items():
        again = LiveRun(pool, make_plan(shards, *changes, "train.steps=3"), tmp_path / name)
        assert again.join() == ["finished"] * 2
        losses[name] = again.losses()
    assert losses["deepspeed"] == pytest.approx(losses["native"], rel=1e-5)


def test_a_live_engine_keeps_whole_what_the_threshold_is_for(pool, shards):
    plan = make_plan(shards, *DEEPSPEED, "parallel.sharding=zero3", *SEPARABLE)
    kept, cut = pool.run(train_functions.persisted, plan.dumps(), ranks=2, timeout=90)[0]
    sizes = {m: [s.numel for n, s in parameter_specs(plan).items() if n.startswith(m)] for m in MODULES}
    assert kept["vision"] == sum(sizes["vision"])
    assert kept["projector"] == sum(sizes["projector"])
    assert set(cut) == {("language", 2)}  # every matrix of the decoder, and nothing else
    assert kept["language"] < 0.01 * sum(sizes["language"])
    assert pool.run(train_functions.persisted, plan.with_("offload.mode=parameters").dumps(), ranks=2)[0][0].keys() == {
        "language"
    }
