"""Checkpoints of whole runs: written while the run goes on, found good or passed over, in any layout."""

import os
import random
import shutil
import signal
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from live import LiveRun, make_plan

from mmlab.cluster.pool import RankPool
from mmlab.lab import Run
from mmlab.messages import EventLog, read_events
from mmlab.tracking import checkpoints
from mmlab.tracking.record import RunRecord
from mmlab.train import rng
from mmlab.train.saves import steered

FROZEN = ("train.vision.frozen=true", "checkpoint.every_steps=2")


def damage(folder):
    """Flip one bit of the largest file."""
    data = max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)


def names(run):
    return sorted(path.name for path in run.paths.checkpoints.glob("step-*"))


def warnings(run):
    return [event["message"] for event in run.events("warning")]


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "phase"), [(1, "save: write"), (0, "save: manifest")])
def test_a_run_killed_while_it_saves_goes_on_from_the_save_before(pool, shards, tmp_path, rank, phase):
    plan = make_plan(shards, *FROZEN)
    whole = LiveRun(pool, plan, tmp_path / "whole")
    assert whole.join() == ["finished"] * 3
    run = LiveRun(pool, plan, tmp_path / "run", fault=("kill", rank, 4, phase))
    run._thread.join(60)
    assert "SIGKILL" in str(run.error) or "signal 9" in str(run.error)
    (made,) = [event["name"] for event in run.events("checkpoint")]
    again = LiveRun(pool, plan, tmp_path / "run", generation=2, restore="latest")
    assert again.join() == ["finished"] * 3
    left = [message for message in warnings(again) if "interrupted" in message]
    assert len(left) == 1
    assert "step-000004-" in left[0]
    assert again.events("restore")[-1]["name"] == made
    lineage = again.events("lineage")[-1]["id"]
    after = {e["step"]: e["loss"] for e in again.events("step") if e["lineage"] == lineage}
    assert after == {step: loss for step, loss in whole.losses().items() if step > 2}


@pytest.mark.slow
def test_a_failure_leaves_the_save_under_way_complete(pool, shards, tmp_path):
    plan = make_plan(shards, "checkpoint.every_steps=3")
    run = LiveRun(pool, plan, tmp_path / "run", fault=("raise", 1, 4, "forward"))
    assert run.join() == ["failed"] * 3
    assert [name[:11] for name in names(run)] == ["step-000003"]
    found = pool.run("train_functions:threads", ranks=3)
    assert not any("mmlab-save" in name for each in found for name in each)


@pytest.mark.slow
def test_damaged_checkpoints_are_passed_over_or_refused_by_name(pool, shards, tmp_path):
    plan = make_plan(shards, *FROZEN, "checkpoint.keep_last=0")
    run = LiveRun(pool, plan, tmp_path / "run")
    run.join()
    second, fourth, sixth = names(run)
    run.paths.run.write_text("{}")
    rows = RunRecord(tmp_path / "run").checkpoints()
    assert [row["name"] for row in rows] == [second, fourth, sixth]
    assert len({(row["shared_bytes"] > 0, row["periodic"], row["reason"]) for row in rows}) == 1
    damage(run.paths.checkpoints / sixth)
    named = LiveRun(pool, plan, tmp_path / "run", generation=2, restore=sixth)
    assert named.join() == ["failed"] * 3
    assert "is not what was saved" in named.events("state")[-1]["reason"]
    newest = LiveRun(pool, plan, tmp_path / "run", generation=3, restore="latest")
    assert newest.join() == ["finished"] * 3
    assert newest.events("restore")[-1]["name"] == fourth
    assert any(sixth in message and f"Went back to {fourth}" in message for message in warnings(newest))
    strict = plan.with_("checkpoint.fall_back=false")
    strict.save(run.paths.plan)
    damage(run.paths.checkpoints / max(names(run), key=lambda n: (run.paths.checkpoints / n).stat().st_mtime))
    refused = LiveRun(pool, strict, tmp_path / "run", generation=4, restore="latest")
    assert refused.join() == ["failed"] * 3
    lanes = plan.with_("data.lanes=2")
    lanes.save(run.paths.plan)
    other = LiveRun(pool, lanes, tmp_path / "run", generation=5, restore=second)
    assert other.join() == ["failed"] * 3
    reason = other.events("state")[-1]["reason"]
    assert f"data.lanes = {plan.data.lanes}" in reason
    assert f"set data.lanes={plan.data.lanes}" in reason
    plan.save(run.paths.plan)
    shutil.rmtree(run.paths.checkpoints / ".frozen")
    lost = LiveRun(pool, plan, tmp_path / "run", generation=6, restore=second)
    assert lost.join() == ["failed"] * 3
    assert "refers to the frozen vision" in lost.events("state")[-1]["reason"]


@pytest.mark.slow
def test_a_periodic_one_that_was_named_does_not_stand_for_the_last(pool, shards, tmp_path):
    """What a run saved at this step may have another name by now, or be gone: it saves again at its end."""
    plan = make_plan(shards, "checkpoint.every_steps=2", "checkpoint.at_end=true", "train.steps=50")
    run = LiveRun(pool, plan, tmp_path / "run", paused=True)
    run.do("step", n=2)
    run.wait_for(lambda: run.events("checkpoint"))
    run.paths.run.write_text("{}")
    record = RunRecord(tmp_path / "run")
    old = record.checkpoints()[-1]
    checkpoints.rename(record, old["name"], "mine")
    run.do("stop")
    assert run.join() == ["stopped"] * 3
    rows = [row for row in record.checkpoints() if row["step"] == old["step"]]
    assert {row["name"] for row in rows} == {old["name"], "mine"}


@pytest.mark.slow
def test_a_full_disk_stops_nothing_but_the_save(pool, shards, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(small)], check=False).returncode:
        pytest.skip("needs the right to mount")
    try:
        plan = make_plan(shards, *FROZEN, f"checkpoint.location={small}")
        run = LiveRun(pool, plan, tmp_path / "run")
        assert run.join() == ["finished"] * 3
        assert len(run.losses()) == 8
        assert [event["step"] for event in run.events("warning")] == [2, 4, 6]
        assert all("MB free" in message and "goes on without it" in message for message in warnings(run))
        assert not run.events("checkpoint")
    finally:
        subprocess.run(["umount", str(small)], check=True)


@pytest.mark.slow
def test_a_location_that_cannot_be_written_is_refused_at_the_start(pool, shards, tmp_path):
    (tmp_path / "file").write_text("")
    plan = make_plan(shards, f"checkpoint.location={tmp_path / 'file'}")
    run = LiveRun(pool, plan, tmp_path / "run")
    assert run.join() == ["failed"] * 3
    assert "cannot be written" in run.events("state")[-1]["reason"]
    assert run.events("state")[-1]["cause"] == "input"


@pytest.mark.slow
def test_time_passes_for_all_ranks_by_one_clock(pool, shards, tmp_path):
    plan = make_plan(shards, "train.steps=100000", "checkpoint.every_minutes=0.005", "checkpoint.keep_last=0")
    run = LiveRun(pool, plan, tmp_path / "run")
    run.wait_for(lambda: len(run.events("checkpoint")) >= 3)
    assert run.do("set", values={"checkpoint.every_minutes": 0.0}).ok
    run.do("stop")
    assert run.join() == ["stopped"] * 3
    made = run.events("checkpoint")
    assert {event["reason"] for event in made} == {"every 0.005 minutes"}
    assert [event["step"] for event in made] == sorted({event["step"] for event in made})


@pytest.mark.slow
def test_a_paused_run_that_is_lost_pauses_where_it_stood(pool, shards, tmp_path):
    plan = make_plan(shards, "train.steps=100000", "checkpoint.every_steps=2")
    run = LiveRun(pool, plan, tmp_path / "run")
    run.wait_step(2)
    run.do("pause")
    run.wait_for(lambda: run.events("checkpoint"))
    stands = run.events("step")[-1]["step"]
    asked = run.do("step", n=5)
    run.wait_for(lambda: run.events("step")[-1]["step"] == stands + 5)
    for pid in pool.pids[:3]:
        os.kill(pid, signal.SIGKILL)
    run._thread.join(30)
    again = LiveRun(pool, plan, tmp_path / "run", generation=2, restore="latest")
    again.wait_for(lambda: again.events("restore") and again.events("state")[-1]["state"] == "paused")
    assert again.events("step")[-1]["step"] == asked.step + 5
    again.do("stop")
    assert again.join() == ["stopped"] * 3


LAYOUTS = {
    "own ranks, pipeline": (),
    "tensor": ("parallel.pp=1", "parallel.tp=2"),
    "encoder on two ranks, tensor": ("parallel.pp=1", "parallel.tp=2", "parallel.vision_dp=2"),
    "zero1": ("parallel.pp=1", "parallel.dp=3", "parallel.sharding=zero1"),
    "first stage, interleaved": (
        "parallel.vision=first_stage", "parallel.vision_dp=0", "parallel.schedule=interleaved",
    ),
    "all ranks, data": ("parallel.vision=all_ranks", "parallel.vision_dp=0", "parallel.pp=1", "parallel.dp=2"),
    "context": ("parallel.pp=1", "parallel.cp=2"),
    "zero3": ("parallel.pp=1", "parallel.dp=2", "parallel.sharding=zero3"),
    "zero bubble": ("parallel.schedule=zb_h1",),
    "zero2, pipeline": ("parallel.dp=2", "parallel.vision_dp=2", "parallel.sharding=zero2"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_every_layout_goes_on_from_every_others_checkpoint(pool, shards, tmp_path):
    """A ring: each layout takes one step from the checkpoint of the layout before, which took that step too."""
    before, name = {}, None
    base = {"data.global_batch": 12, "checkpoint.every_steps": 1, "checkpoint.keep_last": 0}
    for generation, layout in enumerate([*LAYOUTS, next(iter(LAYOUTS))], 1):
        plan = make_plan(shards, base, *LAYOUTS[layout], f"train.steps={generation + 1}", "train.vision.frozen=true")
        if generation > 1:
            plan.save(tmp_path / "run" / "plan.toml")
        run = LiveRun(pool, plan, tmp_path / "run", generation=generation, restore=name)
        assert set(run.join()) == {"finished"}, (layout, run.events("state")[-1])
        lineage = run.events("lineage")[-1]["id"]
        losses = {e["step"]: e["loss"] for e in run.events("step") if e["lineage"] == lineage}
        if before:
            assert losses[generation] == pytest.approx(before[generation], rel=1e-5), layout
        before = losses
        (name,) = [n for n in names(run) if n == f"step-{generation:06d}-{lineage}"]
    assert len(list((run.paths.checkpoints / ".frozen").iterdir())) == 1  # of the same content in every layout


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # botocore and moto are not ours to mend
def test_a_run_keeps_its_checkpoints_in_s3(shards, tmp_path, monkeypatch):
    moto, s3fs = pytest.importorskip("moto.server"), pytest.importorskip("s3fs")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.get_host_and_port()[1]}")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    s3fs.S3FileSystem.clear_instance_cache()
    s3fs.S3FileSystem().mkdir("kept")
    try:
        with RankPool(3) as pool:
            plan = make_plan(shards, *FROZEN, "checkpoint.location=s3://kept/runs", "checkpoint.keep_last=2")
            run = LiveRun(pool, plan, tmp_path / "run")
            assert run.join() == ["finished"] * 3
            run.paths.run.write_text("{}")
            rows = RunRecord(tmp_path / "run").checkpoints()
            assert [row["step"] for row in rows] == [4, 6]
            assert rows[0]["path"] == f"s3://kept/runs/run/{rows[0]['name']}"
            branch = branched_off(tmp_path / "run", rows[0]["name"], monkeypatch)
            (begun,) = branch.checkpoints()
            assert begun["path"] == f"s3://kept/runs/{branch.id}/{rows[0]['name']}"
            going_on = LiveRun(pool, branch.plan, branch.dir, generation=1, restore=begun["name"])
            assert going_on.join() == ["finished"] * 3
            assert [event["step"] for event in going_on.events("step")] == [5, 6, 7]
            again = LiveRun(pool, plan, tmp_path / "run", generation=2, restore=rows[0]["name"])
            assert again.join() == ["finished"] * 3
        lineage = again.events("lineage")[-1]["id"]
        after = {e["step"]: e["loss"] for e in again.events("step") if e["lineage"] == lineage}
        first = {e["step"]: e["loss"] for e in again.events("step") if e["lineage"] != lineage}
        assert after == {step: loss for step, loss in first.items() if step > 4}
    finally:
        server.stop()
        s3fs.S3FileSystem.clear_instance_cache()


def branched_off(folder, name, monkeypatch):
    """A run that goes on for three steps from a checkpoint of step 4, on ranks of the test's own."""
    monkeypatch.setenv("MMLAB_RUNS", str(folder.parent / "branches"))
    lab = SimpleNamespace(_check_fits=lambda plan: None, _launch=lambda run, restore, queue: None)
    return Run(folder).branch("train.steps=7", name=name, lab=lab)


def test_random_streams_stand_where_they_were_saved():
    cpu = torch.device("cpu")

    def draw():
        return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), float(torch.rand(()))

    rng.seed(5, cpu)
    draw()
    kept = rng.states(cpu)
    wanted = draw(), draw()
    rng.seed(6, cpu)
    rng.restore(kept, cpu)
    assert (draw(), draw()) == wanted


def test_steering_goes_on_where_it_stood():
    saved = {"step": 40, "lineage": "a", "began": 100.0, "steering": {"paused": False, "remaining": None}}
    lineage = {"t": 1.0, "kind": "lineage", "id": "a"}

    def at(t, kind, step, **fields):
        return {"t": t, "kind": kind, "step": step, "ok": True, "args": {}, **fields}

    paused = at(101.0, "state", 43, state="paused")
    resumed = at(102.0, "command", 43, verb="resume")
    asked = at(103.0, "command", 43, verb="step", args={"n": 3})
    stopped = at(104.0, "state", 44, state="stopped")
    assert steered(saved, [lineage]) == (False, None)
    assert steered(saved, [lineage, paused]) == (False, 3)
    assert steered(saved, [lineage, paused, resumed]) == (False, None)
    assert steered(saved, [lineage, paused, asked]) == (False, 6)
    assert steered(saved, [lineage, paused, stopped]) == (False, None)
    assert steered(saved, [lineage, at(99.0, "state", 39, state="paused")]) == (False, None)
    left = saved | {"steering": {"paused": False, "remaining": 3}}
    assert steered(left, [lineage]) == (False, 3)
    assert steered(left, []) == (False, None)  # another run's
    assert steered(saved | {"steering": {"paused": True, "remaining": None}}, [lineage]) == (True, None)


def test_events_wait_for_room_on_a_full_disk(tmp_path, monkeypatch):
    log = EventLog(tmp_path / "events.jsonl")
    log.emit("step", step=1)
    real, room = os.write, [20]

    def write(file, data):
        if room[0] < 0:
            return real(file, data)
        if room[0] == 0:
            raise OSError(28, "No space left on device")
        done, room[0] = real(file, data[: room[0]]), 0
        return done

    with monkeypatch.context() as full:
        full.setattr("mmlab.messages.events.os.write", write)
        log.emit("step", step=2)
        log.emit("step", step=3)
        assert [e["step"] for e in read_events(tmp_path / "events.jsonl")[0]] == [1]
        room[0] = -1
        log.emit("step", step=4)
        assert [e["step"] for e in read_events(tmp_path / "events.jsonl")[0]] == [1, 2, 3, 4]
        room[0] = 0
        full.setattr("mmlab.messages.events.MOST_KEPT", 10)
        with pytest.raises(OSError, match="No space"):
            log.emit("step", step=5)
    log.close()
    assert [e["step"] for e in read_events(tmp_path / "events.jsonl")[0]] == [1, 2, 3, 4, 5]
