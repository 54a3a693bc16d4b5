"""Lab and Run with a worker that needs no torch: verbs, attaching, failures, output."""

import asyncio
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from lab_helpers import alive, eventually, processes, python

from mmlab import Run
from mmlab.cluster import registry
from mmlab.errors import CheckpointError, LabError, MmlabError, PlanError, RunFailed
from mmlab.lab import Lab
from mmlab.tracking.sent import WaitInterrupted, WaitTimeout

pytestmark = pytest.mark.timeout(300)


def running(run):
    eventually(lambda: (s := run.status())["state"] == "running" and s["step"] >= 1 and len(s["ranks"]) == 3)
    return run


def test_a_ready_lab_says_so_and_its_files_are_private(lab):
    status = lab.status()
    assert (status["state"], status["engines"], status["ready"]) == ("ready", 3, 3)
    assert repr(lab) == f"<Lab {lab.id}: ready, 3 of 3 engines>"
    folder = registry.registry() / lab.id
    assert folder.stat().st_mode & 0o777 == 0o700
    for path in (folder / "lab.json", folder / "config.json", folder / "keeper.log", *folder.glob("clients/*")):
        assert path.stat().st_mode & 0o777 == 0o600, path


def test_every_verb(free_lab, plan):
    run = free_lab.train(plan)
    assert run.dir.parent == Path(os.environ["MMLAB_RUNS"])
    assert run.plan.train.steps == 100000
    running(run)
    run.pause().wait()
    step = run.status()["step"]
    assert run.status()["state"] == "paused"
    sent = run.step(3)
    assert sent.wait().step == step
    eventually(lambda: run.status()["state"] == "paused" and run.status()["step"] == step + 3)
    run.checkpoint("mine").wait()
    assert [(c["name"], c["step"]) for c in run.checkpoints()] == [("mine", step + 3)]
    sent = run.set({"train.steps": 99999, "train.language.lr": 1e-4})
    eventually(lambda: repr(sent) == f"set: applied after step {step + 3}")
    assert run.status()["steps"] == 99999
    run.resume().wait()
    run.wait(step=step + 6, timeout=60)
    run.restore(step=step + 3).wait()
    assert len({event["lineage"] for event in run.events() if event["kind"] == "lineage"}) == 2
    run.stop().wait()
    assert run.wait(timeout=60) is run
    assert run.status()["state"] == "stopped"
    steps = [row["step"] for row in run.metrics()]
    assert steps == list(range(1, len(steps) + 1))
    with pytest.raises(MmlabError, match="has ended"):
        run.pause()


def test_a_run_that_has_ended_goes_on_from_a_checkpoint_as_another_generation(free_lab, plan):
    run = running(free_lab.train(plan))
    run.checkpoint("step-2").wait()
    run.stop().wait()
    run.wait(timeout=60)
    assert run.restore(name="step-2") is run
    running(run)
    status = run.status()
    assert (status["state"], status["generation"]) == ("running", 2)
    assert [e["parent_step"] for e in run.events() if e["kind"] == "lineage"][-1] == 2
    with pytest.raises(CheckpointError, match="it has: step-2"):
        run.restore(step=77777)


def test_refused_input(free_lab, plan, monkeypatch, tmp_path):
    with pytest.raises(PlanError, match="heads"):
        free_lab.train(plan.with_("model.language.heads=3"))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MMLAB_RUNS", str(tmp_path / "file"))
    with pytest.raises(PlanError, match="MMLAB_RUNS"):
        free_lab.train(plan)
    monkeypatch.undo()
    with pytest.raises(LabError, match="no ipyparallel profile 'nowhere'"):
        Lab(profile="nowhere")
    for engines in (0, 2.5, "3", True):
        with pytest.raises(LabError, match="at least one engine"):
            Lab(engines=engines)
    with pytest.raises(MmlabError, match="no run elsewhere"):
        Run.open("elsewhere")
    for engines, said in ((2, "has 3 engines, and a lab only grows"), (0, "whole number"), (3.5, "whole number")):
        with pytest.raises(LabError, match=said):
            free_lab.grow(engines)
    assert free_lab.grow(3) is free_lab
    run = running(free_lab.train(plan))
    with pytest.raises(PlanError, match=r"these can: .*train\.language\.lr"):
        run.set("model.language.hidden", 12)
    with pytest.raises(PlanError, match=r"train\.language\.lr"):
        run.set("train.language.lr", -1)
    with pytest.raises(LabError, match="busy with run"):
        free_lab.train(plan)
    with pytest.raises(MmlabError, match="at least 1"):
        run.step(0)


def test_a_deleted_run_is_in_nobodys_way(free_lab, plan):
    run = free_lab.train(plan)
    running(run)
    run.stop()
    run.wait(timeout=60, progress=False)
    shutil.rmtree(run.dir)
    assert free_lab.id in [lab.id for lab in Lab.live()]
    assert run.dir not in [known.dir for known in free_lab.runs()]
    again = free_lab.train(plan)
    running(again)
    again.stop()
    again.wait(timeout=30, progress=False)


def test_waiting_can_end_early_and_the_run_goes_on(free_lab, plan, monkeypatch):
    run = running(free_lab.train(plan))
    with pytest.raises(WaitTimeout, match="did not reach its end"):
        run.wait(timeout=0.2)
    waits = threading.Event()

    def asleep(seconds):
        waits.set()
        time.sleep(60)

    def interrupt():
        if waits.wait(60):  # else it would interrupt the tests
            os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    monkeypatch.setattr("mmlab.tracking.waiting.time", SimpleNamespace(monotonic=time.monotonic, sleep=asleep))
    with pytest.raises(WaitInterrupted, match="goes on"):
        run.wait()
    monkeypatch.undo()
    assert run.status()["state"] == "running"

    async def stop_and_wait():
        waiting = asyncio.ensure_future(asyncio.wait_for(run._wait_async(), 30))
        await asyncio.sleep(0.1)
        run.stop()
        return await waiting

    assert asyncio.run(stop_and_wait()) is run

    async def ended():
        return await run

    assert asyncio.run(ended()) is run


def test_cells_reach_the_engines_in_rank_order_while_a_run_goes_on(free_lab, plan):
    run = running(free_lab.train(plan))
    ranks = run.status()["ranks"]
    assert [rank["alive"] for rank in ranks] == [True] * 3
    assert free_lab.view.apply_sync(os.getpid) == [rank["pid"] for rank in ranks]
    assert [rank["engine"] for rank in ranks] == list(free_lab.view.targets)


def test_attaching_from_a_second_process(free_lab, plan):
    run = running(free_lab.train(plan))
    code = (
        "import mmlab; lab = mmlab.Lab.attach(); run = lab.run; ack = run.pause().wait();"
        "print(lab.id, run.id, ack.ok); assert 'ipyparallel' not in __import__('sys').modules;"
        "assert 'torch' not in __import__('sys').modules; mmlab.Run.open(run.id).resume().wait()"
    )
    arguments, environment = python(code)
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == [free_lab.id, run.id, "True"], done.stderr
    assert [event["state"] for event in run.events() if event["kind"] == "state"][-2:] == ["paused", "running"]
    assert Run.open(run.id).dir == Run.open(run.dir).dir == run.dir
    assert run.dir in [one.dir for one in free_lab.runs()]


@pytest.mark.slow
def test_a_million_printed_lines_stay_out_of_every_memory(free_lab, plan):
    view = free_lab.view
    view.apply_sync(os.getpid)
    engine = psutil.Process(view.client[view.targets[1]].apply_sync(os.getpid))
    here = psutil.Process()
    before = engine.memory_info().rss, here.memory_info().rss
    run = free_lab.train(plan.with_({"name": "print-350000"}))
    eventually(lambda: [r["step"] for r in run.status()["ranks"] if r["step"] >= 2][2:], timeout=100)
    view.apply_sync(os.getpid)
    after = engine.memory_info().rss, here.memory_info().rss
    assert max(b - a for a, b in zip(before, after, strict=True)) < 30e6
    for rank in range(3):
        eventually(lambda rank=rank: "from a process of the run\n" in run.log(rank))  # a thread brings it there
        text = run.log(rank)
        assert f"line 349999 of rank {rank}\n" in text
        assert "from a thread of the run\n" in text
    sizes = [path.stat().st_size for path in run.dir.glob("logs/rank-0.log*")]
    assert len(sizes) == 2
    assert max(sizes) <= 5_000_000
    printed = view.client[view.targets[0]].execute("print('in a cell')", block=True)
    assert "in a cell" in printed.stdout


def test_an_exception_in_a_rank_is_named_and_the_lab_trains_again(free_lab, plan):
    run = free_lab.train(plan.with_({"name": "raise-1"}))
    with pytest.raises(RunFailed, match=r"rank 1 \(fake 1\) failed in forward of step 3: ValueError: scripted"):
        run.wait(timeout=60)
    running(free_lab.train(plan))


@pytest.mark.slow
def test_a_rank_that_fails_again_and_again_gets_a_new_process_and_then_the_run_fails(free_lab, plan):
    run = free_lab.train(plan.with_({"name": "raise-1"}, "cluster.max_recoveries=2"))
    with pytest.raises(RunFailed, match=r"rank 1 .*: ValueError: scripted; recovered 2 times before .*: rank 1 "):
        run.wait(timeout=60)
    events = run.events()
    assert [e["state"] for e in events if e["kind"] == "state"].count("failed") == 1
    begun = [e for e in events if e["kind"] == "recovery" and not e["done"]]
    assert [(e["attempt"], e["cause"], e["rank"], e["restore"]) for e in begun] == [
        (1, "exception", 1, None),
        (2, "exception", 1, None),
    ]
    done = [e for e in events if e["kind"] == "recovery" and e["done"]]
    assert [list(e["replaced"]) for e in done] == [[], ["1"]]  # in the same process first
    running(free_lab.train(plan))


@pytest.mark.parametrize("name", ["fake", pytest.param("silent", marks=pytest.mark.slow)])
def test_a_killed_engine_is_named_replaced_and_the_lab_trains_again(free_lab, plan, name):
    run = running(free_lab.train(plan.with_({"name": name})))
    victim = run.status()["ranks"][1]
    os.kill(victim["pid"], signal.SIGKILL)
    status = eventually(lambda: (s := run.status())["state"] == "failed" and s)
    assert status["reason"].startswith("rank 1 (fake 1) failed in forward of step ")
    assert status["reason"].endswith("its process ended")
    eventually(lambda: [e for e in run.events() if e["kind"] == "state"][-1]["state"] == "failed")
    eventually(lambda: victim["engine"] not in [engine["engine"] for engine in free_lab.info()["up"]])
    assert victim["pid"] not in free_lab.view.apply_sync(os.getpid)
    again = running(free_lab.train(plan))
    ranks = again.status()["ranks"]
    assert [rank["alive"] for rank in ranks] == [True] * 3
    assert victim["engine"] not in [rank["engine"] for rank in ranks]
    assert free_lab.view.apply_sync(os.getpid) == [rank["pid"] for rank in ranks]


def test_steering_with_a_stopped_controller(free_lab, plan):
    run = running(free_lab.train(plan))
    controller = eventually(  # its children are looked for every two seconds
        lambda: (found := [p for p in free_lab.info()["processes"] if "controller" in p["kind"]])[1:] and found
    )
    try:
        for process in controller:
            os.kill(process["pid"], signal.SIGSTOP)
        ack = run.pause().wait()
        assert run.status()["state"] == "paused"
        run.step(2)
        eventually(lambda: run.status()["step"] == ack.step + 2)
        run.stop().wait()
        run.wait(timeout=60)
        assert free_lab.status()["state"] == "ready"
    finally:
        for process in controller:
            os.kill(process["pid"], signal.SIGCONT)
    running(free_lab.train(plan))


def test_a_run_can_be_stopped_while_it_waits_for_engines(free_lab, plan):
    run = free_lab.train(plan.with_("parallel.vision_dp=3"))  # five ranks on three engines: two are to be started
    run.stop()
    run.wait(timeout=60)
    assert run.status()["state"] == "stopped"


def test_attach_says_what_there_is(lab):
    assert Lab.attach().id == lab.id
    assert Lab.attach(lab.id).id == lab.id
    with pytest.raises(LabError, match=f"no lab nothing; live labs: <Lab {lab.id}"):
        Lab.attach("nothing")
    eventually(lambda: len(alive(known := processes(lab))) == len(known))  # they are looked up every two seconds
