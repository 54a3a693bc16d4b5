"""A worker without torch that does what the lab relies on: beacon, events, failures, and commands at step boundaries.

What a run does is in its plan's name: "fake" steps on, "print-N" prints N lines, "raise-R" raises in rank R at step 3,
"held-R" does so once there is a file "raise" in the run's folder, "silent" has survivors that report nothing. Ranks do
not keep step, but for one that raises: it waits until rank 0 has done a step.
"""

import secrets
import socket
import subprocess
import sys
import threading
import time
import tomllib
from pathlib import Path

from mmlab.messages import (
    Ack,
    Beacon,
    EventLog,
    Failure,
    Inbox,
    RunPaths,
    claim_report,
    read_beacons,
    read_failures,
    write_failure,
    write_json,
)

STEP = 0.02


def number(name):
    return int(name.rpartition("-")[2])


def open_store(host):
    return host or "127.0.0.1", 1, object()


class Rank:
    def __init__(self, job):
        self.job = job
        self.paths = RunPaths(Path(job.run_dir))
        plan = tomllib.loads(self.paths.plan.read_text())
        self.what, _, self.argument = plan.get("name", "fake").partition("-")
        self.steps = plan["train"]["steps"]
        role = f"fake {job.rank}"
        path = self.paths.ranks / f"rank-{job.rank}.beacon"
        self.beacon = Beacon(path, job.rank, role, socket.gethostname(), job.generation)
        self.role = role
        self.log = None
        self.paused = False
        self.left = -1
        self.stopping = False

    def run(self):
        if self.job.rank == 0:
            self.start_log()
        step = self.restored()
        while step < self.steps and not self.stopping:
            if [f for f in read_failures(self.paths.failures, self.job.generation) if f.rank != self.job.rank]:
                self.survive(step)
                return
            if self.job.rank == 0:
                step = self.boundary(step)
                if self.paused or self.stopping:
                    time.sleep(STEP)
                    continue
            elif (self.paths.root / "over").exists():
                break
            step += 1
            self.beacon.step = step
            self.beacon.update("forward")
            self.work(step)
            time.sleep(STEP)
        if self.job.rank == 0:
            (self.paths.root / "over").touch()
            self.log.emit("state", state="stopped" if self.stopping else "finished", step=step, reason="")

    def restored(self):
        name = self.job.restore
        if name == "latest":
            name = max((path.parent.name for path in self.paths.checkpoints.glob("*/manifest.json")), key=number)
        return number(name) if name else 0

    def start_log(self):
        self.log = EventLog(self.paths.events, secrets.token_hex(2))
        (self.paths.root / "over").unlink(missing_ok=True)
        step = self.restored()
        self.log.emit("lineage", id=self.log.lineage, parent="", parent_step=step, step=step)
        self.log.emit("state", state="running", step=step, reason="")

    def work(self, step):
        if self.what in ("raise", "held") and self.job.rank == int(self.argument) and step == 3:
            while not (self.rank_0_has_stepped() and (self.what == "raise" or (self.paths.root / "raise").exists())):
                time.sleep(STEP)
            raise ValueError("scripted")
        if self.what == "print" and step == 1:
            lines = int(self.argument)
            for number in range(lines):
                print(f"line {number} of rank {self.job.rank}")
            child = threading.Thread(target=lambda: print("from a thread of the run"))
            child.start()
            child.join()
            subprocess.run([sys.executable, "-c", "print('from a process of the run')"], check=True)
        if self.log is not None:
            self.log.emit("step", step=step, loss=1.0 / step, tokens_per_s=100.0)

    def rank_0_has_stepped(self):
        beacons = [b for b in read_beacons(self.paths.ranks) if b.generation == self.job.generation]
        return any(beacon.rank == 0 and beacon.step > 1 for beacon in beacons)

    def boundary(self, step):
        inbox = Inbox(self.paths.control)
        for command in inbox.pending():
            if command.verb in ("pause", "resume"):
                self.state("paused" if command.verb == "pause" else "running", step)
                self.left = -1
            elif command.verb == "step":
                self.state("running", step)
                self.left = command.args["n"]
            elif command.verb == "stop":
                self.stopping = True
            elif command.verb == "checkpoint":
                self.save(command.args.get("name") or f"step-{step}", step)
            elif command.verb == "restore":
                self.log.lineage, parent = secrets.token_hex(2), self.log.lineage
                step = command.args["step"]
                self.log.emit("lineage", id=self.log.lineage, parent=parent, parent_step=step, step=step)
            self.log.emit("command", verb=command.verb, args=command.args, ok=True, step=step)
            inbox.answer(Ack(command.id, True, step, [0], "", time.time()))
        if self.left == 0:
            self.state("paused", step)
        self.left -= self.left > -1
        return step

    def state(self, state, step):
        self.paused = state == "paused"
        self.log.emit("state", state=state, step=step, reason="")

    def save(self, name, step):
        folder = self.paths.checkpoints / name
        folder.mkdir()
        files = {"model": {"size": 1, "sha256": ""}}
        write_json(folder / "manifest.json", {"name": name, "step": step, "time": time.time(), "files": files})

    def fail(self, error):
        failure = Failure(self.job.rank, self.role, "forward", self.beacon.step, "exception", f"ValueError: {error}")
        write_failure(self.paths.failures, self.job.generation, failure)

    def survive(self, step):
        if self.what == "silent" or self.job.recovers:
            return
        first = read_failures(self.paths.failures, self.job.generation)[0]
        if claim_report(self.paths.failures, self.job.generation):
            log = EventLog(self.paths.events)
            log.emit("state", state="failed", step=step, reason=first.sentence())
            log.close()


def run_worker(job, show=None):
    rank = Rank(job)
    if show is not None:
        show(rank)
    try:
        rank.run()
    except ValueError as error:
        rank.fail(error)
    finally:
        rank.beacon.close()
        if rank.log is not None:
            rank.log.close()
