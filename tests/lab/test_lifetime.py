"""How labs end: with their process, when idle, when closed; and what is left, which is nothing."""

import os
import signal
import socket
import subprocess

import pytest
from lab_helpers import assert_ended, eventually, processes, python

from mmlab.cluster import registry
from mmlab.errors import LabError
from mmlab.lab import Lab
from mmlab.messages import read_json

pytestmark = pytest.mark.timeout(300)
MAKE = "import mmlab, time; lab = mmlab.Lab({engines}, worker='fake_worker', outlive={outlive}, idle_timeout={idle});"
TRAIN = (
    "plan = mmlab.Plan.preset('laptop').with_('parallel.pp=1', 'train.steps=100000', {'name': 'fake'});"
    "run = lab.train(plan); run.wait(step=2, timeout=100); print(lab.id, run.dir, flush=True);"
)
UNTIL_TOLD = "import sys; sys.stdin.read()"
"""Waits until the test closes its end."""


@pytest.fixture
def alone(place, tmp_path, monkeypatch):
    """A registry of the test's own, so that other labs are not seen."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    yield
    for paths in registry.live_labs():
        registry.force_end(paths, read_json(paths.state) or {})


@pytest.fixture
def owner(alone):
    """Starts a process like a kernel or script that makes a lab; ends it afterwards."""
    started = []

    def start(code, outlive, idle=1800.0, engines=2):
        arguments, environment = python(MAKE.format(outlive=outlive, idle=idle, engines=engines) + code)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen(arguments, env=environment, text=True, **pipes)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def started(lab_id):
    """What a lab writes of itself once all that it has started is in it; looked up every two seconds."""
    path = registry.registry() / lab_id / "lab.json"
    return eventually(lambda: (s := read_json(path)) and len(s["processes"]) > 3 and s)


@pytest.mark.slow
def test_a_lab_outlives_a_killed_kernel_and_its_run_is_steered_by_the_next(owner):
    kernel = owner(TRAIN + "time.sleep(600)", outlive=True)
    lab_id, run_dir = kernel.stdout.readline().split()
    kernel.send_signal(signal.SIGKILL)
    kernel.wait()
    lab = Lab.attach()
    assert lab.id == lab_id
    run = lab.run
    assert str(run.dir) == run_dir
    step = run.status()["step"]
    run.wait(step=step + 5, timeout=60)
    assert run.pause().wait().ok
    assert lab.view.apply_sync(os.getpid) == [rank["pid"] for rank in run.status()["ranks"]]
    pids = processes(lab)
    controller = next(p["pid"] for p in lab.info()["processes"] if p["kind"] == "controller")
    os.kill(controller, signal.SIGKILL)  # orphans its schedulers
    assert run.resume().wait().ok
    run.stop().wait()
    again = lab.train(run.plan)  # on engines that were started anew
    again.wait(step=2, timeout=100)
    assert lab.view.apply_sync(os.getpid) == [rank["pid"] for rank in again.status()["ranks"]]  # by the new controller
    pids += processes(lab)
    lab.close()
    assert_ended(pids, timeout=0)  # those that end by themselves take a second
    assert lab.status()["state"] == "ended"
    assert again.status()["state"] == "stopped"
    with pytest.raises(LabError, match="has ended"):
        lab.train(run.plan)
    with pytest.raises(LabError, match="no lab lives"):
        Lab.attach()
    assert not list(registry.registry().iterdir())
    assert not [p for p in (registry.Path(os.environ["IPYTHONDIR"])).rglob(f"*{lab_id}*") if p.is_file()]


@pytest.mark.slow
def test_a_script_takes_its_lab_along(owner):
    script = owner(TRAIN + UNTIL_TOLD, outlive=False)
    lab_id, run_dir = script.stdout.readline().split()
    state = started(lab_id)
    script.stdin.close()
    assert script.wait(60) == 0
    assert_ended([(p["pid"], p["started"]) for p in [*state["processes"], state["keeper"]]])
    from mmlab import Run

    assert Run.open(run_dir).status()["state"] == "stopped"


@pytest.mark.slow
def test_an_idle_lab_ends_itself(owner):
    kernel = owner("lab.wait(100); print(lab.id, flush=True);" + UNTIL_TOLD, outlive=True, idle=1.0, engines=1)
    lab_id = kernel.stdout.readline().strip()
    state = started(lab_id)
    kernel.stdin.close()
    assert kernel.wait(60) == 0
    assert_ended([(p["pid"], p["started"]) for p in [*state["processes"], state["keeper"]]])
    assert not (registry.registry() / lab_id).exists()


@pytest.mark.slow
def test_a_plan_says_after_which_time_its_lab_is_idle(owner):
    short = TRAIN.replace("{'name'", "{'cluster.idle_timeout': 1.0, 'name'").replace("=100000", "=3")
    kernel = owner(short, outlive=True, idle=None)
    lab_id, _ = kernel.stdout.readline().split()
    assert kernel.wait(60) == 0
    eventually(lambda: not (registry.registry() / lab_id).exists())


@pytest.mark.slow
def test_what_a_killed_keeper_leaves_is_cleaned_up(owner):
    kernel = owner(TRAIN + "time.sleep(600)", outlive=True)
    lab_id, run_dir = kernel.stdout.readline().split()
    state = started(lab_id)
    os.kill(state["keeper"]["pid"], signal.SIGKILL)
    pids = [(p["pid"], p["started"]) for p in state["processes"]]
    from mmlab import Run

    status = eventually(lambda: (s := Run(run_dir).status())["state"] == "failed" and s)
    assert "ended" in status["reason"]
    assert Lab.live() == []
    assert_ended(pids)
    assert not (registry.registry() / lab_id).exists()


def test_a_lab_that_cannot_be_written_down_is_refused(place, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "file"))
    with pytest.raises(LabError, match="JUPYTER_RUNTIME_DIR"):
        Lab(engines=1)


def test_native_windows_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setattr("sys.platform", "win32")
    with pytest.raises(LabError, match="use WSL2"):
        Lab()


@pytest.mark.slow
def test_a_cluster_stopped_from_the_sidebar_fails_the_run_and_the_lab_trains_again(owner):
    import ipyparallel as ipp

    kernel = owner(TRAIN.replace("'name'", "'cluster.max_recoveries': 0, 'name'") + "time.sleep(600)", outlive=True)
    kernel.stdout.readline()
    lab = Lab.attach()
    ipp.Cluster.from_file(lab.info()["cluster_file"]).stop_cluster_sync()  # what the sidebar's button does
    status = eventually(lambda: (s := lab.run.status())["state"] == "failed" and s)
    assert "its process ended" in status["reason"]
    lab.train(lab.run.plan).wait(step=2, timeout=90)
    pids = processes(lab)
    lab.close()
    assert_ended(pids)


@pytest.mark.slow
def test_a_run_goes_on_when_its_whole_cluster_ends(owner):
    import ipyparallel as ipp

    kernel = owner(TRAIN + "time.sleep(600)", outlive=True)
    kernel.stdout.readline()
    lab = Lab.attach()
    before = {rank["pid"] for rank in lab.run.status()["ranks"]}
    ipp.Cluster.from_file(lab.info()["cluster_file"]).stop_cluster_sync()
    eventually(lambda: (s := lab.run.status())["generation"] == 2 and s["state"] == "running" and s["step"] > 2, 150)
    assert before.isdisjoint(rank["pid"] for rank in lab.run.status()["ranks"])
    pids = processes(lab)
    lab.close()
    assert_ended(pids)


@pytest.mark.slow
def test_a_port_in_use_is_named(alone, place):
    profile = place / "ipython" / "profile_fixed"
    profile.mkdir(parents=True, exist_ok=True)
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (profile / "ipcontroller_config.py").write_text(f"c = get_config()\nc.IPController.ports = [{port}] * 40\n")
        lab = Lab(profile="fixed", engines=1, worker="fake_worker")
        try:
            with pytest.raises(LabError, match=r"the controller ended while it started, and said:[\s\S]*in use"):
                lab.wait(timeout=60)
        finally:
            pids = processes(lab)
            lab.close()
    assert_ended(pids)
