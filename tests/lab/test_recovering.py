"""The real worker on real engines: the run goes on by itself whatever happens to its ranks."""

import io
import os
import signal
import tarfile
import time

import pytest
from lab_helpers import assert_ended, eventually, processes
from PIL import Image

from mmlab import Plan
from mmlab.lab import Lab
from mmlab.messages import PHASES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    """Twenty-four pictures with captions."""
    folder = tmp_path_factory.mktemp("shards")
    with tarfile.open(folder / "train-000000.tar", "w") as tar:
        for number in range(24):
            picture = io.BytesIO()
            Image.new("RGB", (20, 20), (number * 10, 100, 50)).save(picture, "PNG")
            for name, data in (("png", picture.getvalue()), ("txt", b"a picture of number %d" % number)):
                info = tarfile.TarInfo(f"s{number:03d}.{name}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return folder


@pytest.fixture(scope="module")
def real_lab(place):
    lab = Lab(engines=2)
    yield lab
    pids = processes(lab)
    lab.close()
    assert_ended(pids)


@pytest.fixture
def plan(shard):
    changes = {"data.path": str(shard), "data.held_out": "", "data.lanes": 2, "checkpoint.every_steps": 4}
    return Plan.preset("laptop").with_("parallel.pp=1", "train.steps=24", changes)


@pytest.fixture(scope="module")
def losses():
    """Losses of a plan without interruption, by lab: what every other run is to have."""
    known = {}

    def of(lab, plan):
        if not known:
            run = lab.train(plan.with_("cluster.spares=0"))
            run.wait(timeout=100, progress=False)
            known.update({row["step"]: row["loss"] for row in run.metrics()})
        return known

    return of


def recoveries(run):
    return [event for event in run.events() if event["kind"] == "recovery"]


def finish(lab, run, plan, losses):
    """Wait for the end, whatever the state is meanwhile; nothing is lost, repeated or changed."""
    run.wait(timeout=100, progress=False)
    assert run.status()["state"] == "finished"
    assert {row["step"]: row["loss"] for row in run.metrics()} == losses(lab, plan)
    assert run.ledger().ok, run.ledger().problems


def paused_with_a_checkpoint(run):
    """Pause a run that has just been asked for after six steps; its last periodic checkpoint is there. The step."""
    step = run.step(6).wait(100).step + 6
    eventually(lambda: (s := run.status())["state"] == "paused" and s["step"] == step)
    eventually(lambda: step // 4 * 4 in [row["step"] for row in run.checkpoints()])
    return step


def slowed(run):
    """The same run at work, half a second a step: what is done to it now comes before its end."""
    paused_with_a_checkpoint(run)
    run.chaos(slow=1, seconds=0.5, phase="forward").wait()
    run.resume().wait()


def test_a_killed_rank_is_replaced_and_the_run_goes_on(real_lab, plan, losses):
    losses(real_lab, plan)
    run = real_lab.train(plan)
    step = paused_with_a_checkpoint(run)
    victim, survivor = run.status()["ranks"][1], run.status()["ranks"][0]
    run.chaos(kill=1, phase="backward").wait()  # in its next step
    run.resume().wait()
    states = set()
    end = time.monotonic() + 100
    while run.status()["generation"] == 1 or run.status()["state"] != "running":
        states.add(run.status()["state"])
        assert time.monotonic() < end, run.events()[-5:]
        time.sleep(0.01)
    assert states <= {"running", "starting"}
    eventually(lambda: run.status()["ranks"][1:])
    ranks = run.status()["ranks"]
    assert ranks[0]["pid"] == survivor["pid"]
    assert ranks[1]["pid"] != victim["pid"]
    finish(real_lab, run, plan, losses)
    begun, done = recoveries(run)
    assert (begun["cause"], begun["rank"], done["generation"], list(done["replaced"])) == ("lost", 1, 2, ["1"])
    assert begun["restore"] == "latest"
    assert [event["from_step"] for event in run.events() if event["kind"] == "restore"] == [step // 4 * 4]


def test_a_stopped_rank_is_found_named_and_replaced(real_lab, plan, losses):
    losses(real_lab, plan)
    run = real_lab.train(plan.with_("cluster.hang_timeout=2"))
    slowed(run)
    victim = run.status()["ranks"][0]
    os.kill(victim["pid"], signal.SIGSTOP)
    finish(real_lab, run, plan, losses)
    begun, done = recoveries(run)
    assert (begun["cause"], begun["rank"], list(done["replaced"])) == ("hung", 0, ["0"])
    assert "its process is stopped (SIGSTOP)" in begun["evidence"]
    assert not [p for p in processes(real_lab) if p[0] == victim["pid"]] or not os.path.exists(f"/proc/{victim['pid']}")


def test_a_fault_while_it_recovers_is_the_next_attempt(real_lab, plan, losses):
    losses(real_lab, plan)
    run = real_lab.train(plan)
    slowed(run)
    first, second = (rank["pid"] for rank in run.status()["ranks"])
    os.kill(first, signal.SIGKILL)
    eventually(lambda: run.status()["generation"] == 2)
    os.kill(second, signal.SIGKILL)
    finish(real_lab, run, plan, losses)
    assert run.status()["generation"] in (2, 3)  # two engines replaced at once, or one after the other
    assert {rank["pid"] for rank in run.status()["ranks"]}.isdisjoint({first, second})


def test_a_paused_run_is_still_paused_and_can_be_stopped_while_it_recovers(real_lab, plan):
    run = real_lab.train(plan.with_("train.steps=100000"))
    run.wait(step=2, timeout=100, progress=False)
    run.pause().wait()
    run.set("train.language.lr", 1.5e-4).wait()  # after the pause: no checkpoint that comes yet holds it
    os.kill(run.status()["ranks"][1]["pid"], signal.SIGKILL)
    eventually(lambda: run.status()["generation"] == 2 and run.status()["state"] == "paused", timeout=100)
    (again,) = eventually(lambda: [e for e in run.events() if e.get("verb") == "set" and e["source"] == "recovery"])
    assert again["args"] == {"values": {"train.language.lr": 1.5e-4}}
    os.kill(run.status()["ranks"][1]["pid"], signal.SIGKILL)
    eventually(lambda: run.status()["generation"] == 3)
    run.stop()
    run.wait(timeout=60, progress=False)
    assert run.status()["state"] == "stopped"


def test_chaos_slows_a_rank_and_hangs_it_and_it_comes_free(real_lab, plan, losses):
    losses(real_lab, plan)
    run = real_lab.train(plan.with_("cluster.hang_timeout=2"))
    run.wait(step=2, timeout=100, progress=False)
    pids = [rank["pid"] for rank in run.status()["ranks"]]
    slow = run.chaos(slow=1, seconds=0.4, phase="forward").wait()
    run.wait(step=slow.step + 1, timeout=30, progress=False)
    event = next(row for row in run.metrics() if row["step"] == slow.step + 1)
    assert event["phases"][1][PHASES.index("forward")] >= 0.4
    hang = run.chaos(hang=1).wait()
    assert hang.message == "rank 1 is to hang in where it computes"
    finish(real_lab, run, plan, losses)
    begun, done = recoveries(run)
    assert (begun["cause"], begun["rank"], begun["step"], done["replaced"]) == ("hung", 1, hang.step, {})
    assert "rank 1" in begun["reason"]
    assert "train/chaos.py" in begun["evidence"]
    assert [rank["pid"] for rank in run.status()["ranks"]] == pids
