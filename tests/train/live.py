"""A run on warm ranks that a test watches and steers through its folder."""

import os
import signal
import threading
import time
from contextlib import suppress

import train_functions

from mmlab.messages import RunPaths, new_command, read_events, send, wait_ack
from mmlab.messages.stacks import ask, wait_answers
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
    """Runs a plan in the pool in a thread; everything else goes through the run's folder.

    `paused`: it waits before its first step, which a short run would have done before a command reached it. A fault of
    kind "wait" lasts until `release`.
    """

    def __init__(self, pool, plan, folder, paused=False, **job):
        pool.grow(plan.world_size)
        self.paths = RunPaths(folder)
        self.paths.create()
        if not self.paths.plan.exists():
            plan.save(self.paths.plan)
        self.world_size, self.pool = plan.world_size, pool
        if paused:
            self.command("pause")
        self.states, self.error = None, None
        self._thread = threading.Thread(target=self._run, args=(pool, job), daemon=True)
        self._thread.live = self
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
        return self.answer(self.command(verb, **args))

    def answer(self, command):
        ack = wait_ack(self.paths.control, command.id, 60)
        assert ack is not None, f"no ack for {command.verb}: {self.error}"
        return ack

    def heard(self):
        """Return once rank 0 knows of what was sent: its control thread answers a question, then looks for commands."""
        for _ in range(2):
            assert wait_answers(self.paths.ranks, [0], ask(self.paths.ranks), 60)

    def join(self):
        self._thread.join(100)
        assert not self._thread.is_alive()
        if self.error:
            raise self.error
        return self.states

    def release(self):
        """End the fault that waits for it."""
        (self.paths.root / train_functions.RELEASED).touch()

    def losses(self):
        return {e["step"]: e["loss"] for e in self.events("step")}


def end_left():
    """End the runs that a test has left under way: the next one shares their ranks."""
    for live in [thread.live for thread in threading.enumerate() if hasattr(thread, "live")]:
        while live._thread.is_alive():
            with suppress(KeyError, ProcessLookupError):  # the pool ends them as well
                for pid in live.pool.pids[: live.world_size]:
                    os.kill(pid, signal.SIGKILL)
            live._thread.join(1.0)
