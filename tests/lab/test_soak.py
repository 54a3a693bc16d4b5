"""Random faults over one run on real engines: its weights and samples are those of an uninterrupted one."""

import io
import os
import random
import resource
import signal
import tarfile
import time
from collections import Counter

import pytest
from lab_helpers import assert_ended, processes
from PIL import Image

from mmlab import Plan
from mmlab.lab import Lab
from mmlab.messages import ENDED

pytestmark = [pytest.mark.slow, pytest.mark.alone, pytest.mark.timeout(900)]
SEED = int(os.environ.get("MMLAB_SOAK_SEED", "20240607"))
FAULTS = int(os.environ.get("MMLAB_SOAK_FAULTS", "20"))
KINDS = {"kill": 12, "stop": 4, "hang": 6, "notice": 6, "corrupt": 6, "save": 3, "pause": 3}
"""How often each kind comes among forty, but each at least twice: SIGKILL; SIGSTOP; a hang in a phase; a notice that a
process will be taken away; a flipped byte in the newest checkpoint and then SIGKILL; saves that fail; SIGKILL to a
paused run."""
PHASES = (("data", "encode", "exchange", "optimizer"), ("data", "forward", "backward", "pipeline", "optimizer"))
"""Where the encoder's rank, and those of the language model, may hang."""
RANKS, SPARES = 3, 2
LIMIT = 500_000
"""Bytes that no file may exceed while saves are to fail: a checkpoint's are larger, all others smaller."""


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    """Forty pictures with captions."""
    folder = tmp_path_factory.mktemp("soak")
    with tarfile.open(folder / "train-000000.tar", "w") as tar:
        for number in range(40):
            picture = io.BytesIO()
            Image.new("RGB", (20, 20), (number * 6, 100, 50)).save(picture, "PNG")
            for name, data in (("png", picture.getvalue()), ("txt", b"a picture of number %d" % number)):
                info = tarfile.TarInfo(f"s{number:03d}.{name}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return folder


@pytest.fixture
def lab(place):
    """Ranks, and two engines that wait for one to fail."""
    lab = Lab(engines=RANKS + SPARES)
    yield lab
    pids = processes(lab)
    lab.close()
    assert_ended(pids)


def limit_files(size):
    """In an engine: no file may become larger (-1: any may)."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


class Soak:
    """One run, and what is done to it."""

    def __init__(self, lab, run, random):
        self.lab, self.run, self.random = lab, run, random
        self.done = Counter()
        self.damaged = set()

    def wait(self, condition, seconds=60):
        """Until something has happened; the run must not have ended."""
        end = time.monotonic() + seconds
        while not (found := condition()):
            status = self.run.status()
            assert status["state"] not in ENDED, (SEED, self.done, status)
            assert time.monotonic() < end, (SEED, self.done, status, self.run.events()[-6:])
            time.sleep(0.02)
        return found

    def running(self, step):
        """Wait for a step of the generation that is at work; its status."""

        def at_work():
            status = self.run.status()
            busy = status["state"] == "running" and len(status["ranks"]) == RANKS
            return busy and status["step"] >= step and status

        return self.wait(at_work)

    def strike(self, kind, step):
        """One fault at a step or soon after; waits until the run goes on."""
        status = self.running(step)
        rank = self.random.choice(status["ranks"])
        generation = status["generation"]
        time.sleep(self.random.random() * 0.1)
        if kind == "save":
            return self.fail_saves(status)
        if kind == "pause":
            self.run.pause().wait(30)
        if kind == "corrupt":
            self.wait(lambda: len({row["name"] for row in self.run.checkpoints()} - self.damaged) > 1)
            self.damaged.add(self.run.chaos(corrupt="last").ack.message.split()[-1])
        if kind == "stop":
            os.kill(rank["pid"], signal.SIGSTOP)
        elif kind == "notice":
            self.run.chaos(notice=rank["rank"], seconds=self.random.choice([0.0, 5.0]))
        elif kind == "hang":
            self.run.chaos(hang=rank["rank"], phase=self.random.choice(PHASES[rank["rank"] > 0]))
        else:
            self.run.chaos(kill=rank["rank"])
        self.wait(lambda: self.run.status()["generation"] > generation)
        if kind == "pause":
            self.wait(lambda: self.run.status()["state"] == "paused")
            self.run.resume()
        return None

    def fail_saves(self, status):
        """The next periodic save fails, loudly, and nothing else does."""
        view = self.lab.view
        view.apply_sync(limit_files, LIMIT)
        try:
            before = len([e for e in self.run.events() if e["kind"] == "warning"])
            self.wait(lambda: len([e for e in self.run.events() if e["kind"] == "warning"]) > before)
        finally:
            view.apply_sync(limit_files, -1)
        assert self.run.status()["generation"] == status["generation"]


def drawn(random):
    """The kinds of all faults, in random order: about FAULTS of them, in the proportions of KINDS."""
    kinds = [kind for kind, many in KINDS.items() for _ in range(max(2, round(many * FAULTS / 40)))]
    return random.sample(kinds, len(kinds))


def plan_of(shard, faults):
    changes = {
        "data.path": str(shard), "data.held_out": "", "data.lanes": 2, "checkpoint.every_steps": 3,
        "cluster.max_recoveries": 1000, "cluster.hang_timeout": 1.5, "cluster.spares": SPARES,
        "tracking.trace_every": 0,
    }  # fmt: skip
    return Plan.preset("laptop").with_(f"train.steps={3 * faults + 10}", changes)


def weights(run, folder):
    """Every file of the exported last checkpoint."""
    return {path.name: path.read_bytes() for path in run.export(folder)}


def test_faults_change_nothing(lab, shard, tmp_path, capsys):
    draw = random.Random(SEED)
    kinds = drawn(draw)
    plan = plan_of(shard, len(kinds))
    plain = lab.train(plan)
    plain.wait(timeout=120, progress=False)
    run = lab.train(plan)
    assert plan.world_size == RANKS
    soak, step, began = Soak(lab, run, draw), 1, time.monotonic()
    for kind in kinds:
        soak.strike(kind, step)
        soak.done[kind] += 1
        step += draw.randint(1, 3)
    run.wait(timeout=120, progress=False)
    recovered = [e for e in run.events() if e["kind"] == "recovery" and e["done"]]
    with capsys.disabled():
        times = sorted(e["seconds"] for e in recovered)
        took = f"{len(recovered)} recoveries, median {times[len(times) // 2]:.1f} s, longest {times[-1]:.1f} s"
        print(f"\nsoak, seed {SEED}: {dict(soak.done)} in {time.monotonic() - began:.0f} s; {took}")
    assert run.status()["state"] == "finished"
    assert [row["loss"] for row in run.metrics()] == [row["loss"] for row in plain.metrics()]
    assert weights(run, tmp_path / "run") == weights(plain, tmp_path / "plain")
    assert run.ledger().ok, run.ledger().problems
    assert run.ledger().steps == plain.ledger().steps
