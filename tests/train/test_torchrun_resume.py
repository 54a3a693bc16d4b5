"""Under torchrun: ranks that die, are told to leave, or change their layout, and the run goes on by itself."""

import os
import signal
import subprocess
import sys
import time

import pytest
from test_spot import ACTION, serve  # noqa: F401  a fixture

from mmlab import Run
from mmlab.messages import read_beacons
from mmlab.tracking.record import list_runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
STEPS = 1000


class Torchrun:
    """`torchrun -m mmlab.train` on three ranks, in a process."""

    def __init__(self, folder, *arguments, options=(), job="", metadata="http://127.0.0.1:9"):
        head = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", *options, "-m", "mmlab.train"]
        environment = os.environ | {"MMLAB_RUNS": str(folder), "OMP_NUM_THREADS": "1", "MMLAB_RESUME": job,
                                    "MMLAB_METADATA": metadata}  # fmt: skip
        self.folder = folder
        self.process = subprocess.Popen(
            [*head, *arguments], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def run(self):
        (record,) = list_runs(self.folder)
        return Run(record.paths.root)

    def wait_step(self, step, seconds=100):
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            if list_runs(self.folder) and len(self.run().metrics()) >= step:
                return self.run()
            time.sleep(0.1)
        raise AssertionError(self.end())

    def end(self, seconds=100):
        """What it said. torch's agent may need a minute: a signal that reaches it while it asks for a process's end
        leaves the lock of that taken (`Popen.poll`), and it waits twice 30 s for a process that has long ended."""
        try:
            return self.process.communicate(timeout=seconds)[0]
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(self.process.communicate()[0]) from None


@pytest.fixture
def start(shards, tmp_path):
    begun = []

    def make(*arguments, **more):
        begun.append(Torchrun(tmp_path, *arguments, **more))
        return begun[-1]

    make.plan = ("laptop", f"data.path={shards}", f"train.steps={STEPS}", "checkpoint.every_steps=4")
    yield make
    for job in begun:
        if job.process.poll() is None:
            job.process.terminate()
            job.end()


def until(happened, seconds=100):
    end = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.1)


def whole(run):
    steps = [row["step"] for row in run.metrics()]
    return steps == list(range(1, len(steps) + 1)) and run.ledger().ok


def test_a_killed_rank_is_restarted_by_torchrun_and_the_run_goes_on(start):
    job = start(*start.plan, options=("--max-restarts", "2"))
    run = job.wait_step(6)
    until(run.checkpoints)  # it is written while the run goes on
    last = run.status()["step"]
    os.kill(run.status()["ranks"][1]["pid"], signal.SIGKILL)
    until(lambda: run.status()["generation"] == 2 and run.status()["state"] == "running")
    run.wait(step=last + 4, timeout=100)
    assert whole(run)
    assert [e["from_step"] for e in run.events() if e["kind"] == "restore"] >= [4]
    run.stop()
    assert "stopped" in job.end()
    assert job.process.returncode == 0


def test_told_to_leave_it_saves_and_its_folder_starts_it_again(start):
    job = start(*start.plan, job="job-7")
    run = job.wait_step(2)
    job.process.send_signal(signal.SIGTERM)
    said = job.end()
    assert job.process.returncode != 0
    status = run.status()
    assert status["state"] == "stopped", said
    assert "(SIGTERM): saved step-" in status["reason"]
    event = next(e for e in run.events() if e["kind"] == "notice")
    assert run.checkpoints()[-1]["step"] == event["step"] == status["step"]
    requeued = start(*start.plan, job="job-7")
    requeued.wait_step(status["step"] + 2)
    assert run.status()["generation"] == 2
    requeued.process.send_signal(signal.SIGTERM)
    requeued.end()
    status = run.status()
    wrong = start(str(run.dir), "parallel.tp=2")
    assert "the plan needs 5 ranks and torchrun started 3" in wrong.end()
    again = start(str(run.dir), "parallel.pp=1", "parallel.tp=2")
    again.wait_step(status["step"] + 2)
    assert run.plan.parallel.tp == 2
    assert whole(run)
    again.process.send_signal(signal.SIGTERM)
    again.end()
    step, generation = run.status()["step"], run.status()["generation"]
    requeued = start(*start.plan, job="job-7")  # the plan that was asked for, though the run has another layout by now
    requeued.wait_step(step + 2)
    assert run.status()["generation"] == generation + 1
    run.stop()
    requeued.end()
    assert requeued.process.returncode == 0


def test_another_layout_of_as_many_ranks_in_the_same_processes_then_the_cloud_takes_the_host(start, serve):  # noqa: F811
    cloud = serve("aws")
    job = start(*start.plan, metadata=cloud.address)
    run = job.wait_step(2)
    pids = [rank["pid"] for rank in run.status()["ranks"]]
    refused = run.relayout("parallel.dp=2")
    with pytest.raises(Exception, match="needs 5 ranks and torchrun started 3"):
        refused.wait()
    ack = run.relayout("parallel.pp=1", "parallel.dp=2").wait()
    run.wait(step=ack.step + 2, timeout=100)
    assert [b.pid for b in read_beacons(run._record.paths.ranks)] == pids
    assert run.status()["generation"] == 2
    assert whole(run)
    end = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 120))
    cloud.say(ACTION, f'{{"action": "terminate", "time": "{end}"}}')
    said = job.end()
    assert job.process.returncode != 0
    assert "is about to be taken away (aws): saved step-" in run.status()["reason"], said
    assert f"exitcode  : {128 + signal.SIGTERM}" in said
