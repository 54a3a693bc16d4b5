"""A run folder as rank 0 would write it, without training: for tests of what reads runs.

`python synthetic.py FOLDER STEPS` plays a live run there until it ends or is stopped.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from PIL import Image, ImageDraw

from mmlab.lab import Run
from mmlab.messages import PHASES, Ack, Beacon, EventLog, Inbox, new_command, send
from mmlab.messages.checkpoints import seal
from mmlab.messages.failures import Failure, write_failure
from mmlab.messages.files import process_started
from mmlab.messages.runs import create_run
from mmlab.plan import Plan
from mmlab.plan.simulate import estimated_costs
from mmlab.tracking.doctor import Diagnosis, diagnose
from mmlab.tracking.record import RunRecord
from mmlab.tracking.sent import Sent

SHARES = {
    "vision": {"data": 12, "encode": 30, "backward": 22, "exchange": 25, "reduce": 6, "optimizer": 4},
    "language": {"exchange": 8, "forward": 28, "backward": 46, "pipeline": 14, "reduce": 7, "optimizer": 5},
}
CODED = {
    "compressor": "powersgd", "options": {"rank": 4}, "seconds": 0.002, "residual": 0.5, "dense": 900_000,
    "kept": 900_000,
}  # fmt: skip
NAMES = ["red apple", "cat face", "blue car", "rocket", "snowman", "green book", "bicycle", "sun"]


class SyntheticRun:
    """Writes a run's files step by step. The losses are an exponential fall with seeded noise."""

    def __init__(self, root: Path, plan: Plan | None = None, name: str = "synthetic") -> None:
        self.plan = plan or Plan.preset("quickstart").with_("train.steps=120")
        self.paths = create_run(root, name, self.plan.dumps(), self.plan.world_size, self.plan.train.steps)
        self.events = EventLog(self.paths.events, lineage="a")
        self.places = self.plan.layout().places
        self.random = random.Random(7)
        self.step = 0
        self.beacons: list[Beacon] = []
        self.coded: dict[str, Any] = CODED
        self.error: float | None = None

    @property
    def dir(self) -> Path:
        return self.paths.root

    def host(self, node: int) -> str:
        """The name of a node: another host than this one, so that nobody looks for its processes."""
        return f"node-{node}" if self.plan.cluster.ranks_per_node else "here"

    def start(self) -> None:
        self.events.emit("state", state="starting", step=0, reason="")
        self.beacons = [
            Beacon(self.paths.ranks / f"rank-{place.rank}.beacon", place.rank, place.label, self.host(place.node), 0)
            for place in self.places
        ]
        self.events.emit("lineage", id="a", parent="", parent_step=0, step=0)
        ranks = [{"rank": place.rank, "role": place.label} for place in self.places]
        self.events.emit("state", state="running", step=0, reason="", ranks=ranks)

    def lose(self, rank: int) -> None:
        """The process of a rank is gone, as the ranks left or the keeper find it."""
        failure = Failure(rank, self.places[rank].label, "forward", self.step, "lost", "its process ended")
        write_failure(self.paths.failures, 0, failure)

    def kill(self, rank: int) -> None:
        """The beacon of a rank names a process of this host that is no more; nobody has noticed."""
        self._as(rank, socket.gethostname(), 2**22 + 1)

    def live_here(self, *ranks: int) -> None:
        """These ranks are processes of this host (this one), whose life can be seen."""
        for rank in ranks:
            self._as(rank, socket.gethostname(), os.getpid())

    def _as(self, rank: int, host: str, pid: int) -> None:
        beacon = self.beacons[rank]
        beacon._fixed = (*beacon._fixed[:2], pid, process_started(pid))
        beacon._tail = (beacon._tail[0], host.encode())
        beacon.update("forward", 0)

    def stall(self, seconds: float, phases: dict[int, str]) -> None:
        """Ranks have been in these phases for so long."""
        with patch("mmlab.messages.beacon.time.time", return_value=time.time() - seconds):
            for rank, phase in phases.items():
                self.beacons[rank].update(phase, 1)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.one_step()

    def one_step(self) -> None:
        self.step += 1
        loss = 0.9 + 6 * math.exp(-self.step / 40) + self.random.uniform(-0.15, 0.15)
        seconds = 0.2 + self.random.uniform(0, 0.05)
        lr = {module: 1e-3 * (1 - self.step / 1000) for module in ("vision", "projector", "language")}
        norms = {module: 1.0 + self.random.random() for module in lr}
        self.events.emit(
            "step", step=self.step, loss=loss, tokens=900, images=16, samples=16, seconds=seconds,
            tokens_per_s=900 / seconds, images_per_s=16 / seconds, data_wait=0.004, data_queue=2, lr=lr,
            grad_norm=norms, grad_norm_total=math.hypot(*norms.values()),
            phases=[self._phases(place, seconds) for place in self.places],
            traffic=self._traffic(), communication={"vision": {"seconds": 0.01, "exposed": 0.004}},
            compression={"vision": self._coded()},
        )  # fmt: skip
        for beacon in self.beacons:
            beacon.step = self.step
            beacon.update("forward", 0)

    def _traffic(self) -> dict[str, list[int]]:
        """Bytes of each group of the axes that the plan uses."""
        layout = self.plan.layout()
        sizes = {"tp": 1_400_000, "pp": 260_000, "tokens": 64_000, "vision": 25_000, "language": 890_000}
        return {
            axis: [size * len(group) for group in layout.groups(axis)]
            for axis, size in sizes.items()
            if layout.groups(axis)
        }

    def _coded(self) -> dict[str, Any]:
        """How the step's gradients were compressed; with `error`, that is measured in this one step."""
        error, self.error = self.error, None
        return self.coded if error is None else {**self.coded, "error": error}

    def _phases(self, place: Any, seconds: float) -> list[float]:
        shares = SHARES[place.role]
        total = sum(shares.values()) + 6
        spread = [seconds * shares.get(phase, 0) / total * self.random.uniform(0.8, 1.2) for phase in PHASES]
        spread[PHASES.index("control")] = 0.001
        return spread

    def trace(self, slow: int = -1) -> None:
        """Write the op times of the last step: as planned, each kind of op of a rank a little slower or faster; rank
        `slow` takes twice as long."""
        costs = {key: 0.011 * cost * self.random.uniform(0.8, 1.25) * (1 + (key[0] == slow))
                 for key, cost in estimated_costs(self.plan).items()}  # fmt: skip
        for rank, ops in enumerate(self.plan.schedule().simulate(costs)):
            timed = [[op.kind, op.microbatch, start + 0.0005, end + 0.0005, op.chunk] for op, start, end in ops]
            record = {"step": self.step, "t0": 1.7e9 + 0.0003 * rank, "ops": timed}
            with open(self.paths.traces / f"rank-{rank}.jsonl", "a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")

    def evaluate(self, pictures: int = 8) -> None:
        loss = 0.9 + 6 * math.exp(-self.step / 40)
        self.events.emit("eval", step=self.step, loss=loss, loss_swapped=1.4 * loss, tokens=800)
        folder = self.paths.samples / f"step-{self.step:06d}"
        folder.mkdir(exist_ok=True)
        items = []
        for index in range(pictures):
            image = Image.new("RGBA", (72, 72), (0, 0, 0, 0))
            draw = ImageDraw.Draw(image)
            draw.ellipse((8, 8, 64, 64), fill=((index * 57) % 255, (index * 91) % 255, 160, 255))
            image.save(folder / f"{index}.png")
            text = NAMES[index] if index % 3 else NAMES[(index + 1) % 8]
            items.append({"image": f"{index}.png", "prompt": "What is this?", "truth": NAMES[index], "text": text})
        self.events.emit("samples", step=self.step, folder=str(folder), items=items)

    def checkpoint(self, name: str = "", periodic: bool = True, reason: str = "every 10 steps", **about: Any) -> str:
        """Save as a run would, but for what is in the files; `about` goes into the manifest. Its name."""
        name = name or f"step-{self.step:06d}-{self.events.lineage}"
        folder = self.paths.checkpoints / name
        folder.mkdir()
        files = {}
        for rank in range(len(self.places)):
            data = f"{name} {rank}".encode() * 1000
            (folder / f"__{rank}_0.distcp").write_bytes(data)
            files[f"__{rank}_0.distcp"] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        taken = self.step * self.plan.data.global_batch
        cursors = {"sources": [{"epoch": 0, "positions": [taken // 4] * 4, "lane": 0}], "taken": [taken], "offset": 0,
                   "window": 0, "grouped": 0, "settings": {}}  # fmt: skip
        manifest = {
            "format": 2, "name": name, "step": self.step, "time": time.time(), "seconds": 0.4, "files": files,
            "lineage": self.events.lineage, "cursors": cursors, "periodic": periodic, "plan": self.plan.dumps(),
            "loss": 0.9 + 6 * math.exp(-self.step / 40), "reason": reason, "frozen": {}, **about,
            "bytes": sum(entry["size"] for entry in files.values()), "world_size": len(self.places),
        }  # fmt: skip
        (folder / "manifest.json").write_text(json.dumps({**manifest, "seal": seal(manifest)}))
        self.events.emit("checkpoint", step=self.step, name=name, path=str(folder), seconds=0.4, stall=0.01,
                         bytes=manifest["bytes"], shared_bytes=0, periodic=periodic, reason=reason)  # fmt: skip
        return name

    def restore(self, name: str, lineage: str) -> None:
        """Go back to a checkpoint, on a new lineage."""
        manifest = json.loads((self.paths.checkpoints / name / "manifest.json").read_text())
        self.step, self.events.lineage = manifest["step"], lineage
        self.events.emit("lineage", step=self.step, id=lineage, parent=manifest["lineage"], parent_step=self.step)
        self.events.emit("restore", step=self.step, name=name, from_step=self.step, values={})

    def state(self, state: str, reason: str = "") -> None:
        self.events.emit("state", state=state, step=self.step, reason=reason)

    def finish(self, state: str = "finished", reason: str = "") -> None:
        self.state(state, reason)
        self.close()

    def close(self) -> None:
        for beacon in self.beacons:
            beacon.close()

    def answer(self) -> list[str]:
        """Apply what waits in the inbox, as at a step boundary; the verbs."""
        verbs = []
        inbox = Inbox(self.paths.control)
        for command in inbox.pending():
            ranks = list(range(len(self.places)))
            self.events.emit(
                "command", id=command.id, verb=command.verb, args=command.args, ok=True, ranks=ranks, message="",
                step=self.step,
            )  # fmt: skip
            inbox.answer(Ack(command.id, True, self.step, ranks, "", time.time()))
            verbs.append(command.verb)
        return verbs

    def play(self, interval: float, end: threading.Event) -> None:
        """Train, and answer commands at each boundary, until told to stop or `end` is set."""
        paused = False
        while not end.is_set():
            for verb in self.answer():
                if verb == "stop":
                    self.finish("stopped")
                    return
                if verb in ("pause", "resume"):
                    paused = verb == "pause"
                    self.state("paused" if paused else "running")
            if not paused:
                self.one_step()
                if self.step % 20 == 0:
                    self.evaluate()
            if self.step >= self.plan.train.steps:
                self.finish()
                return
            time.sleep(interval)
        self.close()


@contextmanager
def playing(root: Path, steps: int = 0) -> Iterator[SyntheticRun]:
    """A run whose ranks have started and done so many steps."""
    run = SyntheticRun(root)
    run.start()
    run.train(steps)
    yield run
    run.close()


def branch_out(run: SyntheticRun, last: int) -> None:
    """Three lineages with checkpoints: a (steps 10, 20, 30), b from 20 (30), c from b's 30 with `last` steps, live."""
    for _ in range(3):
        run.train(10)
        run.checkpoint()
    run.restore("step-000020-a", "b")
    run.train(10)
    run.checkpoint("best", periodic=False, reason="command")
    run.restore("best", "c")
    run.train(last)


class InboxRun:
    """The verbs of a run by its folder alone."""

    def __init__(self, run_dir: Path) -> None:
        self.dir = run_dir

    def _send(self, verb: str, **args: Any) -> Sent:
        command = new_command(verb, args, source="test")
        send(self.dir / "control", command)
        return Sent(verb, command.id, self.dir / "control")

    def doctor(self) -> Diagnosis:
        return diagnose(RunRecord(self.dir), seconds=0.2)

    def lineages(self) -> list[dict[str, Any]]:
        return Run(self.dir).lineages()

    def checkpoints(self) -> list[dict[str, Any]]:
        return Run(self.dir).checkpoints()

    def branches(self) -> list[dict[str, Any]]:
        return Run(self.dir).branches()

    def pause(self) -> Sent:
        return self._send("pause")

    def resume(self) -> Sent:
        return self._send("resume")

    def abort(self) -> Sent:
        return self._send("abort", generation=0)

    def stop(self) -> Sent:
        return self._send("stop")

    def checkpoint(self, name: str = "") -> Sent:
        return self._send("checkpoint", **({"name": name} if name else {}))

    def step(self, n: int = 1) -> Sent:
        return self._send("step", n=n)

    def set(self, key: str, value: Any) -> Sent:
        return self._send("set", values={key: value})


if __name__ == "__main__":
    run = SyntheticRun(Path(sys.argv[1]), Plan.preset("quickstart").with_(f"train.steps={sys.argv[2]}"))
    print(run.dir, flush=True)
    run.start()
    run.play(0.1, threading.Event())
