"""A run on warm ranks that a test watches and steers through its folder."""

import threading
import time

import train_functions

from mmlab.messages import RunPaths, new_command, read_events, send, wait_ack
from mmlab.plan import Plan


def make_plan(data, *changes, preset="laptop"):
    """A short run of a preset on some data, without evaluation and checkpoints but for those asked for."""
    base = {
        "data.path": str(data),
        "data.held_out": "",
        "train.steps": 8,
        "checkpoint.every_steps": 0,
        "checkpoint.at_end": False,
    }
    return Plan.load(preset).with_(base, *changes)


class LiveRun:
    """Runs a plan in the pool in a thread; everything else goes through the run's folder."""

    def __init__(self, pool, plan, folder, **job):
        pool.grow(plan.world_size)
        self.paths = RunPaths(folder)
        self.paths.create()
        if not self.paths.plan.exists():
            plan.save(self.paths.plan)
        self.world_size = plan.world_size
        self.states, self.error = None, None
        self._thread = threading.Thread(target=self._run, args=(pool, job), daemon=True)
        self._thread.start()

    def _run(self, pool, job):
        try:
            args = (
                str(self.paths.root),
                *(job.get(k, d) for k, d in (("generation", 1), ("restore", None), ("fault", None))),
            )
            self.states = pool.run(train_functions.run, *args, ranks=self.world_size, timeout=90)
        except Exception as error:
            self.error = error

    def events(self, kind=None):
        return [e for e in read_events(self.paths.events)[0] if kind is None or e["kind"] == kind]

    def wait_for(self, condition, seconds=60):
        end = time.monotonic() + seconds
        while not (found := condition()):
            assert time.monotonic() < end, f"waited {seconds} s in vain; events: {self.events()[-5:]}"
            assert self.error is None, self.error
            time.sleep(0.01)
        return found

    def wait_step(self, step):
        return self.wait_for(lambda: [e for e in self.events("step") if e["step"] >= step])

    def command(self, verb, **args):
        command = new_command(verb, args, "test")
        send(self.paths.control, command)
        return command

    def do(self, verb, **args):
        ack = wait_ack(self.paths.control, self.command(verb, **args).id, 30)
        assert ack is not None, f"no ack for {verb}: {self.error}"
        return ack

    def join(self):
        self._thread.join(100)
        assert not self._thread.is_alive()
        if self.error:
            raise self.error
        return self.states

    def losses(self):
        return {e["step"]: e["loss"] for e in self.events("step")}
