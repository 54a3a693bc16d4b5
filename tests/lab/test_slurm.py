"""A lab in a batch queue, with stand-ins for sbatch, squeue, srun and scancel that run the job on this host."""

import json
import os
import socket
import sys

import pytest
from lab_helpers import FAKE, assert_ended, eventually, processes

from mmlab import Plan
from mmlab.errors import LabError
from mmlab.lab import Lab

COMMANDS = {
    # the job waits until the test lets it go, then runs as a local process group
    "sbatch": """
script = sys.argv[-1]
code = f'''
import os, subprocess, time
while not os.path.exists({str(here / "go")!r}):
    time.sleep(0.02)
os.execv("/bin/sh", ["sh", {str(here / "job.sh")!r}])
'''
text = open(script).read()
(here / "job.sh").write_text(text)
tasks = next(line.split("=")[1] for line in text.splitlines() if line.startswith("#SBATCH --ntasks"))
job = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"SLURM_NTASKS": tasks}, start_new_session=True,
                       stdout=open(here / "out", "wb"), stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
(here / "pid").write_text(str(job.pid))
print("Submitted batch job 4242")
""",
    "squeue": """
assert "4242" in sys.argv, sys.argv
if not (here / "cancelled").exists():
    print("RUNNING (None)" if (here / "go").exists() else "PENDING (Resources)")
""",
    "srun": """
tasks = [subprocess.Popen(sys.argv[1:]) for _ in range(int(os.environ["SLURM_NTASKS"]))]
sys.exit(max(task.wait() for task in tasks))
""",
    "scancel": """
assert sys.argv[1:] == ["4242"], sys.argv
(here / "cancelled").touch()
import contextlib, signal
with contextlib.suppress(ProcessLookupError):
    os.killpg(int((here / "pid").read_text()), signal.SIGKILL)
""",
}


@pytest.fixture
def slurm(place, tmp_path, monkeypatch):
    """A profile "slurm", and Slurm's commands on PATH; returns the folder in which they meet."""
    commands = tmp_path / "bin"
    commands.mkdir()
    head = f"#!{sys.executable}\nimport os, subprocess, sys\nfrom pathlib import Path\nhere = Path({str(tmp_path)!r})\n"
    for name, code in COMMANDS.items():
        (commands / name).write_text(head + code)
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.chdir(tmp_path)
    profile = place / "ipython" / "profile_slurm"
    profile.mkdir(parents=True, exist_ok=True)
    (profile / "ipcluster_config.py").write_text('c = get_config()\nc.Cluster.engine_launcher_class = "slurm"\n')
    return tmp_path


@pytest.mark.slow
def test_a_lab_waits_in_the_queue_trains_and_cancels_its_job(slurm):
    lab = Lab(profile="slurm", engines=2, worker=FAKE, start_timeout=0.1)
    try:
        status = eventually(lambda: (s := lab.status())["state"] == "queued" and s["reason"] and s)
        assert (status["job"], status["reason"], status["ready"]) == ("4242", "PENDING (Resources)", 0)
        assert "queued, 0 of 2 engines, job 4242: PENDING (Resources)" in repr(lab)
        run = lab.train(Plan.preset("laptop").with_("parallel.pp=1", "train.steps=100000", {"name": "fake"}))
        assert run.status()["state"] in ("queued", "starting")
        (slurm / "go").touch()
        run.wait(step=2, timeout=100)
        assert [rank["host"] for rank in run.status()["ranks"]] == [socket.gethostname()] * 2
        info = lab.info()
        connection = f"{info['profile_dir']}/security/ipcontroller-{info['cluster_id']}-client.json"
        with open(connection) as file:
            found = json.load(file)
        assert found["curve_serverkey"]
        assert found["interface"] == "tcp://*" or "0.0.0.0" in found["interface"]
        assert lab.view.apply_sync(os.getpid) == [rank["pid"] for rank in run.status()["ranks"]]
        pids = processes(lab)
    finally:
        lab.close()
    assert_ended(pids)
    assert (slurm / "cancelled").exists()
    assert not list(slurm.glob("*.sbatch"))


@pytest.mark.slow
def test_a_job_that_leaves_the_queue_is_named(slurm):
    lab = Lab(profile="slurm", engines=1, worker=FAKE)
    try:
        eventually(lambda: lab.status()["reason"] == "PENDING (Resources)")
        (slurm / "cancelled").touch()
        with pytest.raises(LabError, match="job 4242 left the queue without engines"):
            lab.wait(timeout=60)
        pids = processes(lab)
    finally:
        lab.close()
    assert_ended(pids)


def test_a_batch_command_that_is_missing_is_named(slurm):
    (slurm / "bin" / "sbatch").unlink()
    lab = Lab(profile="slurm", engines=1, worker=FAKE)
    try:
        with pytest.raises(LabError, match="sbatch was not found"):
            lab.wait(timeout=60)
    finally:
        lab.close()
