"""A whole run on real ranks: commands, lineage, checkpoints, failures."""

import json
import time
from itertools import pairwise

import pytest
import torch
from conftest import write_set  # tests/train/conftest.py
from live import LiveRun, make_plan

from mmlab import CheckpointError, Run
from mmlab.messages import PHASES, new_command, read_beacons, read_failures, send, write_json
from mmlab.train.evaluate import swap_images


def test_run_finishes_with_events_beacons_traces(pool, shards, tmp_path):
    run = LiveRun(pool, make_plan(shards, f"data.held_out='{shards}'"), tmp_path / "run")
    assert run.join() == ["finished"] * 3
    states = [e["state"] for e in run.events("state")]
    assert states == ["starting", "running", "finished"]
    steps = run.events("step")
    assert [e["step"] for e in steps] == list(range(1, 9))
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert len(steps[0]["phases"]) == 3
    for phase in ("forward", "backward", "reduce", "optimizer"):
        assert steps[3]["phases"][1][PHASES.index(phase)] > 0, phase
    assert steps[3]["grad_norm_total"] == pytest.approx(sum(v**2 for v in steps[3]["grad_norm"].values()) ** 0.5)
    assert all(beacon.done for beacon in read_beacons(run.paths.ranks))
    trace = json.loads((run.paths.traces / "rank-1.jsonl").read_text().splitlines()[0])
    assert trace["step"] == 2
    assert [op[0] for op in trace["ops"]][:3] == ["recv_tokens", "forward", "send_forward"]
    (evaluation,) = run.events("eval")
    assert evaluation["loss"] > 0
    assert evaluation["ratio"] == pytest.approx(evaluation["loss_swapped"] / evaluation["loss"])
    (samples,) = run.events("samples")
    assert len(samples["items"]) == 8
    assert all((run.paths.samples / samples["folder"] / item["image"]).exists() for item in samples["items"])


def test_commands_apply_on_the_same_step_on_all_ranks(pool, shards, tmp_path):
    plan = make_plan(shards, "train.steps=100000")
    run = LiveRun(pool, plan, tmp_path / "run")
    run.wait_step(3)
    seen = run.events("step")[-1]["step"]
    ack = run.do("pause")
    assert run.events("state")[-1]["state"] == "paused"  # whoever has the answer finds the state
    assert ack.ok
    assert ack.ranks == [0, 1, 2]
    time.sleep(0.3)
    assert run.events("step")[-1]["step"] == ack.step  # nothing runs during a pause
    assert ack.step >= seen
    acked = run.do("step", n=3)
    run.wait_for(
        lambda: run.events("state")[-1]["state"] == "paused" and run.events("step")[-1]["step"] == acked.step + 3
    )
    assert run.do("set", values={"train.language.lr": 1e-4, "train.vision.weight_decay": 0.5}).ok
    refused = run.do("set", values={"parallel.tp": 2})
    assert not refused.ok
    assert "train.language.lr" in refused.message
    assert not run.do("step", n=0).ok
    assert not run.do("restore", step=77).ok
    run.do("step", n=1)
    run.wait_for(lambda: run.events("step")[-1]["step"] == acked.step + 4)
    assert run.events("step")[-1]["lr"]["language"] == pytest.approx(1e-4, rel=0.01)
    run.do("resume")
    assert run.do("stop").ok
    assert run.join() == ["stopped"] * 3
    commands = run.events("command")
    assert [c["verb"] for c in commands] == ["pause", "step", "set", "set", "step", "restore", "step", "resume", "stop"]
    assert all(c["ranks"] == [0, 1, 2] for c in commands)


def test_pause_takes_at_most_one_more_step(pool, shards, tmp_path):
    """A command that arrives during a step is applied at its end."""
    run = LiveRun(pool, make_plan(shards, "train.steps=50"), tmp_path / "run", fault=("wait", 1, 3, "forward"))
    run.wait_for(
        lambda: [b for b in read_beacons(run.paths.ranks) if b.rank == 1 and b.step == 3 and b.phase == "forward"]
    )
    pause = run.command("pause")
    run.heard()
    run.release()
    assert run.answer(pause).step == 3
    run.do("stop")
    run.join()


def test_commands_before_the_first_step_and_garbage_in_the_inbox(pool, shards, tmp_path):
    plan = make_plan(shards)
    folder = tmp_path / "run"
    (folder / "control").mkdir(parents=True)
    send(folder / "control", new_command("pause"))
    (folder / "control" / "00-garbage.json").write_text("{not json")
    (folder / "control" / "01-foreign.json").write_text('{"id": "01-foreign", "verb": "explode"}')
    run = LiveRun(pool, plan, folder)
    run.wait_for(lambda: [e for e in run.events("state") if e["state"] == "paused"])
    assert not run.events("step")
    run.do("resume")
    assert run.join() == ["finished"] * 3
    assert len(list(run.paths.acks.glob("0*-*.json"))) >= 2
    assert not list(run.paths.control.glob("*.json"))


def test_replaying_commands_gives_the_same_losses_bit_for_bit(pool, shards, tmp_path):
    def play(folder):
        run = LiveRun(pool, make_plan(shards, "train.steps=6"), folder)
        run.do("step", n=3)
        run.wait_for(lambda: run.events("state") and run.events("state")[-1]["state"] == "paused")
        run.do("set", values={"train.language.lr": 3e-3})
        run.do("resume")
        run.join()
        return run.losses()

    def first_pause(folder):
        (folder / "control").mkdir(parents=True)
        send(folder / "control", new_command("pause"))
        return folder

    first, second = play(first_pause(tmp_path / "a")), play(first_pause(tmp_path / "b"))
    assert first == second
    plain = LiveRun(pool, make_plan(shards, "train.steps=6"), tmp_path / "c")
    plain.join()
    assert plain.losses()[5] != first[5]


def test_restore_resumes_bit_for_bit_on_a_new_lineage(pool, shards, tmp_path):
    run = LiveRun(pool, make_plan(shards, "checkpoint.every_steps=3"), tmp_path / "run")
    run.join()
    before = run.losses()
    names = sorted(p.name for p in run.paths.checkpoints.glob("step-*"))
    assert [name[:11] for name in names] == ["step-000003", "step-000006"]
    again = LiveRun(pool, make_plan(shards), tmp_path / "run", generation=2, restore=names[0])
    assert again.join() == ["finished"] * 3
    lineages = again.events("lineage")
    assert [event["parent_step"] for event in lineages] == [0, 3]
    assert lineages[1]["parent"] == lineages[0]["id"]
    after = {e["step"]: e["loss"] for e in again.events("step") if e["lineage"] == lineages[1]["id"]}
    assert after == {step: loss for step, loss in before.items() if step > 3}


@pytest.mark.parametrize(
    "changes",
    [
        ("parallel.tp=2", "parallel.pp=1"),
        pytest.param(("parallel.pp=1",), marks=pytest.mark.slow),
        pytest.param(("parallel.dp=2", "parallel.vision_dp=2"), marks=pytest.mark.slow),
        ("parallel.vision=first_stage", "parallel.vision_dp=0", "parallel.pp=1"),
        pytest.param(("parallel.vision=all_ranks", "parallel.vision_dp=0", "parallel.dp=2"), marks=pytest.mark.slow),
    ],
)
def test_another_layout_loads_the_checkpoint(pool, shards, tmp_path, changes):
    run = LiveRun(pool, make_plan(shards, "checkpoint.every_steps=3"), tmp_path / "run")
    run.join()
    before = run.losses()
    name = min(p.name for p in run.paths.checkpoints.glob("step-*"))
    other = make_plan(shards, *changes)
    other.save(run.paths.plan)
    again = LiveRun(pool, other, tmp_path / "run", generation=2, restore=name)
    assert set(again.join()) == {"finished"}
    lineage = again.events("lineage")[-1]["id"]
    for event in again.events("step"):
        if event["lineage"] == lineage:
            assert event["loss"] == pytest.approx(before[event["step"]], rel=1e-5)


def test_live_checkpoint_and_restore(pool, shards, tmp_path):
    run = LiveRun(pool, make_plan(shards, "train.steps=100000"), tmp_path / "run")
    run.wait_step(2)
    run.do("pause")
    made = run.do("checkpoint", name="before")
    assert made.ok
    for name in ("../escape", "n" * 250, "\ud800", ["list"]):
        assert not run.do("checkpoint", name=name).ok
    (run.paths.checkpoints / "damaged").mkdir()
    (run.paths.checkpoints / "damaged" / "manifest.json").write_text("{}")
    assert not run.do("restore", step=12345).ok
    run.do("step", n=2)
    run.wait_for(
        lambda: run.events("state")[-1]["state"] == "paused" and run.events("step")[-1]["step"] == made.step + 2
    )
    first = [run.losses()[made.step + i] for i in (1, 2)]
    assert run.do("restore", name="before").ok
    run.do("step", n=2)
    lineage = run.events("lineage")[-1]["id"]
    run.wait_for(lambda: len([e for e in run.events("step") if e["lineage"] == lineage]) == 2)
    assert [e["loss"] for e in run.events("step") if e["lineage"] == lineage] == first
    run.do("stop")
    run.join()


def test_checkpoint_of_another_model_and_damaged_ones_are_refused(pool, shards, tmp_path):
    run = LiveRun(pool, make_plan(shards, "checkpoint.every_steps=3"), tmp_path / "run")
    run.join()
    name = min(p.name for p in run.paths.checkpoints.glob("step-*"))
    other = make_plan(shards, "model.language.hidden=64")
    other.save(run.paths.plan)
    again = LiveRun(pool, other, tmp_path / "run", generation=2, restore=name)
    assert set(again.join()) == {"failed"}
    assert "is of another model" in again.events("state")[-1]["reason"]
    make_plan(shards).save(run.paths.plan)
    data = next((run.paths.checkpoints / name).glob("__1_*"))
    data.write_bytes(data.read_bytes()[:-100])
    once_more = LiveRun(pool, make_plan(shards), tmp_path / "run", generation=3, restore=name)
    assert set(once_more.join()) == {"failed"}
    assert "is damaged" in once_more.events("state")[-1]["reason"]
    other_bits = max(p.name for p in run.paths.checkpoints.glob("step-*"))
    data = next((run.paths.checkpoints / other_bits).glob("__2_*"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    last = LiveRun(pool, make_plan(shards), tmp_path / "run", generation=4, restore=other_bits)
    assert set(last.join()) == {"failed"}
    assert f"{data.name} is not what was saved" in last.events("state")[-1]["reason"]


def test_commands_that_come_after_the_last_step_are_answered(pool, shards, tmp_path):
    plan = make_plan(shards, f"data.held_out='{shards}'", "checkpoint.at_end=true", "train.steps=2")
    run = LiveRun(pool, plan, tmp_path / "run", fault=("wait", 1, 2, "checkpoint"))
    run.wait_for(lambda: [b for b in read_beacons(run.paths.ranks) if b.rank == 1 and b.phase == "checkpoint"])
    late = run.command("pause")
    run.release()
    late = run.answer(late)
    assert not late.ok
    assert "last step" in late.message
    assert run.join() == ["finished"] * 3
    ending = ["checkpoint", "eval", "samples", "command", "state"]  # saved before the evaluation, which might fail
    assert [e["kind"] for e in run.events()][-5:] == ending


def test_a_stopped_run_says_so_once_its_weights_are_saved(pool, shards, tmp_path):
    run = LiveRun(pool, make_plan(shards, "train.steps=100000", "checkpoint.at_end=true"), tmp_path / "run")
    run.wait_step(1)
    assert run.do("stop").ok
    assert run.join() == ["stopped"] * 3
    assert [e["kind"] for e in run.events()][-3:] == ["command", "checkpoint", "state"]
    assert [e["state"] for e in run.events("state")] == ["starting", "running", "stopped"]


def test_a_run_goes_on_to_the_steps_last_asked_for(pool, shards, tmp_path):
    (tmp_path / "run" / "control").mkdir(parents=True)
    send(tmp_path / "run" / "control", new_command("pause"))
    run = LiveRun(pool, make_plan(shards, "train.steps=3"), tmp_path / "run")
    assert run.do("set", values={"train.steps": 5}).ok
    run.do("checkpoint", name="here")
    run.do("checkpoint", name="here")
    run.do("stop")
    run.join()
    again = LiveRun(pool, make_plan(shards), tmp_path / "run", generation=2, restore="here")
    assert again.join() == ["finished"] * 3
    assert again.events("step")[-1]["step"] == 5
    assert not list(run.paths.checkpoints.glob(".*"))


@pytest.mark.parametrize(
    "phase",
    [*(pytest.param(p, marks=pytest.mark.slow) for p in ("forward", "reduce", "optimizer")), "backward", "encode"],
)
def test_an_exception_in_one_rank_frees_the_others_and_names_it(pool, shards, tmp_path, phase):
    rank = 0 if phase == "encode" else 2
    run = LiveRun(pool, make_plan(shards, "train.steps=100000"), tmp_path / "run", fault=("raise", rank, 3, phase))
    run.wait_step(2)
    assert run.join() == ["failed"] * 3  # a group waits for six hours
    failed = [e for e in run.events("state") if e["state"] == "failed"]
    assert len(failed) == 1
    assert failed[0]["rank"] == rank
    assert failed[0]["phase"] == phase
    assert failed[0]["step"] == 3
    assert "scripted fault" in failed[0]["reason"]
    records = read_failures(run.paths.failures, 1)
    assert records[0].rank == rank
    again = LiveRun(pool, make_plan(shards, "train.steps=2"), tmp_path / "again")  # the same processes
    assert again.join() == ["finished"] * 3


def test_ranks_that_talk_through_shared_memory_are_freed_too(pool, shards, tmp_path):
    plan = make_plan(shards, "cluster.collectives=shm", "train.steps=100000")
    run = LiveRun(pool, plan, tmp_path / "run", fault=("raise", 2, 3, "backward"))
    assert run.join() == ["failed"] * 3
    (failed,) = [e for e in run.events("state") if e["state"] == "failed"]
    assert (failed["rank"], failed["phase"], failed["step"]) == (2, "backward", 3)
    losses = {}
    for collectives in ("shm", "gloo"):  # in the same processes, and the same to the bit
        again = LiveRun(pool, make_plan(shards, f"cluster.collectives={collectives}"), tmp_path / collectives)
        assert again.join() == ["finished"] * 3
        losses[collectives] = again.losses()
    assert losses["shm"] == losses["gloo"]


def test_out_of_memory_names_rank_phase_and_what_to_do(pool, shards, tmp_path):
    run = LiveRun(pool, make_plan(shards), tmp_path / "run", fault=("memory", 1, 2, "backward"))
    assert run.join() == ["failed"] * 3
    reason = run.events("state")[-1]["reason"]
    assert "out of memory in backward" in reason
    assert "rank 1 (stage 0 tp 0)" in reason
    assert "activation_checkpointing" in reason


def test_a_loss_that_is_not_a_number_stops_the_run(pool, shards, tmp_path):
    run = LiveRun(pool, make_plan(shards, "train.language.lr=1e30", "train.clip_norm=0"), tmp_path / "run")
    assert run.join() == ["failed"] * 3
    assert "not a finite number" in run.events("state")[-1]["reason"]


def test_undecodable_images_are_masked_and_named_and_too_many_stop_the_run(pool, tmp_path):
    few = write_set(tmp_path / "few", 80, 0.0, broken=2)
    run = LiveRun(pool, make_plan(few, "train.steps=5"), tmp_path / "run")
    assert run.join() == ["finished"] * 3
    named = {e["sample"] for e in run.events("bad_image")}
    assert {name.rsplit("/", 1)[1] for name in named} == {"s00000", "s00001"}
    assert all("UnidentifiedImageError" in e["reason"] for e in run.events("bad_image"))
    many = write_set(tmp_path / "many", 80, 0.0, broken=30)
    stopped = LiveRun(pool, make_plan(many, "train.steps=30"), tmp_path / "stopped")
    assert stopped.join() == ["failed"] * 3
    assert "data.max_bad_share" in stopped.events("state")[-1]["reason"]


def test_missing_shards_fail_with_one_readable_message(pool, tmp_path):
    run = LiveRun(pool, make_plan(tmp_path / "nowhere"), tmp_path / "run")
    assert run.join() == ["failed"] * 3
    assert "nowhere" in run.events("state")[-1]["reason"]


def test_one_process_alone(pool, shards, tmp_path):
    """A plan is never without an encoder rank in this version: the smallest run has two ranks."""
    run = LiveRun(pool, make_plan(shards, "parallel.pp=1", "train.steps=2"), tmp_path / "run")
    assert run.join() == ["finished"] * 2


def test_swapped_images_are_those_of_other_samples(pool, shards):
    from mmlab.data.pipeline import DataSource

    source = DataSource(make_plan(shards))
    manifest, _ = source.manifest(1, source.start())
    swap = swap_images(manifest)
    assert swap is not None
    assert sorted(swap) == sorted(swap.values()) == [i for i, s in enumerate(manifest.samples) if s.tiles]
    assert all(a != b for a, b in swap.items())
    source.close()


def test_optimizer_schedule():
    from mmlab.plan.schema import ModuleTrain
    from mmlab.train.optim import learning_rate

    settings = ModuleTrain(lr=1.0, warmup_steps=4, min_lr_ratio=0.1)
    rates = [learning_rate(settings, step, 20) for step in range(1, 21)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4] == 1.0
    assert rates[-1] == pytest.approx(0.1)
    assert all(a >= b for a, b in pairwise(rates[3:]))
    assert torch.isclose(torch.tensor(learning_rate(settings, 50, 20)), torch.tensor(0.1))


@pytest.mark.slow
def test_weights_leave_and_come_in_by_module(pool, shards, tmp_path):
    """Export a checkpoint saved under tp 2; a new run that starts from it and learns nothing has its held-out loss."""
    data = f"data.held_out='{shards}'"
    plan = make_plan(shards, data, "parallel.tp=2", "parallel.pp=1", "checkpoint.at_end=true", "train.steps=4")
    run = LiveRun(pool, plan, tmp_path / "run")
    run.join()
    write_json(run.paths.run, {"id": "run"})
    with pytest.raises(CheckpointError, match="it has: step-000004"):
        Run(run.paths.root).export(tmp_path / "hf", step=3)
    files = Run(run.paths.root).export(tmp_path / "hf", step=4)
    assert {f"{f.parent.name}/{f.name}" for f in files} >= {"vision/model.safetensors", "language/model.safetensors"}
    changes = {f"train.{m}.init_from": str(tmp_path / "hf" / m) for m in ("vision", "projector", "language")}
    still = {f"train.{m}.lr": 0.0 for m in ("vision", "projector", "language")}
    again = LiveRun(pool, make_plan(shards, data, changes, still, "train.steps=1"), tmp_path / "again")
    again.join()
    assert again.events("eval")[0]["loss"] == pytest.approx(run.events("eval")[0]["loss"], rel=1e-5)
