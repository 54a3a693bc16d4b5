"""The keeper: one process a lab, which owns its engines, starts runs on them, and leaves nothing behind when it ends.

Kernels, scripts and the command line only read its files and leave requests, so none of them can hang with the
controller, and runs live on when they end.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmlab.cluster.elastic import grow_back, shrink
from mmlab.cluster.engine_info import EngineLost
from mmlab.cluster.engine_main import KEEPER
from mmlab.cluster.engines import Engines
from mmlab.cluster.launching import (
    ActiveRun,
    Lacking,
    Stopped,
    bring_and_send,
    go_on,
    launch,
    refuse,
    stop_requested,
    take_over,
)
from mmlab.cluster.processes import MARK, end_all
from mmlab.cluster.recovery import fall_back, recover, tidy
from mmlab.cluster.registry import (
    LabConfig,
    LabPaths,
    live_clients,
    remove_files,
    take_requests,
    this_process,
    write_private,
)
from mmlab.cluster.watching import watch
from mmlab.errors import MmlabError
from mmlab.messages import Command, Failure, write_failure
from mmlab.messages.files import process_alive, read_json
from mmlab.messages.moves import NotRescued

TICK = 0.1
"""Seconds between looks at requests, engines and runs: a lost engine is noticed within one."""
RESCUE = 10.0
"""Seconds between attempts to keep a state where there was no room for it: each one copies what fits."""
CLOSE = 10.0
"""Seconds that batch jobs get to be cancelled."""


class Keeper:
    """Runs one lab until it is closed, idle for too long, or its owner ends."""

    def __init__(self, paths: LabPaths, config: LabConfig, log: logging.Logger) -> None:
        self.paths = paths
        self.config = config
        self.log = log
        self.me = this_process()
        self.closing = threading.Event()
        self.reason = ""
        self.runs: list[ActiveRun] = []
        self.engines = Engines(config, self.me["host"], log, self._idle)
        self._pending: list[ActiveRun] = []
        self._wake = threading.Condition()
        self._ending = threading.Lock()
        self._later: dict[Path, float] = {}
        """When (`time.monotonic`) a run whose state there was no room for is looked after again."""
        self._written: dict[str, Any] = {}
        self._busy_at = time.monotonic()
        threading.Thread(target=self._launch_runs, name="mmlab-launch", daemon=True).start()

    def serve(self) -> None:
        """Tick until the lab is to end; then end everything that it started."""
        try:
            self._write("starting")
            while not self.closing.is_set():
                for request in take_requests(self.paths):
                    self._obey(request)
                self.engines.look()
                self.engines.take_away()
                for run in list(self.runs):
                    with contextlib.suppress(OSError):  # a full disk under a run: the lab goes on, and looks again
                        self._look_after(run)
                self._write(self._state())
                self._check_end()
                self.closing.wait(TICK)
        except Exception:
            self.log.exception("keeper")
            self.reason = "the keeper failed"
        finally:
            self._finish()

    def _look_after(self, run: ActiveRun) -> None:
        """One look at a run. What goes wrong in it ends that run: the lab and its engines go on."""
        if time.monotonic() < self._later.get(run.paths.root, 0.0):
            return
        try:
            if not run.ended:
                watch(run, self.engines)
                self._grow(run)
            if run.again is not None:
                self._queue(go_on(run))
            elif run.ended and not run.tidied:
                tidy(run)
        except NotRescued as error:
            if run.paths.root not in self._later:
                message = f"{error}; it is tried again every {RESCUE:g} s until there is room, or the lab ends"
                self.log.warning(message)  # the run's own log may have no room either
                run.emit("warning", message=message)
            self._later[run.paths.root] = time.monotonic() + RESCUE
        except OSError:
            raise
        except Exception as error:
            self._give_up(run, error)
        else:
            self._later.pop(run.paths.root, None)

    def _give_up(self, run: ActiveRun, error: Exception) -> None:
        """Fail a run for something that its keeper cannot handle, such as a damaged plan.toml; its ranks are freed."""
        self.log.exception("run %s", run.paths.root)
        first = Failure(0, "rank 0", "start", run.step, "exception", f"{type(error).__name__}: {error}")
        with contextlib.suppress(OSError):
            write_failure(run.paths.failures, run.generation, first)
        run.again = None
        run.fail(first, str(error) if isinstance(error, MmlabError) else first.sentence())

    def _obey(self, request: dict[str, Any]) -> None:
        self.log.info("request %s", request)
        if request["verb"] == "close":
            self._close("closed")
        elif request["verb"] == "engines":
            self.engines.ensure(int(request["n"]))
        elif request["verb"] == "bring":
            self._bring(int(request["n"]), request["run_dir"], Command(**request["command"]))
        elif request["verb"] == "launch":
            try:
                run = take_over(request)
            except (MmlabError, OSError) as error:
                self.log.exception("launch")
                refuse(request, str(error))
                return
            limits = {name: value for name, value in request["limits"].items() if name not in self.config.fixed}
            self.config = self.engines.config = replace(self.config, **limits)
            self._queue(run)

    def _grow(self, run: ActiveRun) -> None:
        """Have somebody wait for the engines of a run's full layout while it is at work in a smaller one."""
        if run.stepped and not run.growing and run.again is None and run.paths.full_plan.is_file():
            run.growing = True
            arguments = (run, self.engines, self.closing.is_set)
            threading.Thread(target=grow_back, args=arguments, name="mmlab-grow", daemon=True).start()

    def _bring(self, n: int, run_dir: str, command: Command) -> None:
        """Give a run of this lab a command as soon as there are `n` engines."""
        for run in self.runs:
            if str(run.paths.root) == run_dir:
                arguments = (run, self.engines, n, command, self.closing.is_set)
                threading.Thread(target=bring_and_send, args=arguments, name="mmlab-bring", daemon=True).start()

    def _queue(self, run: ActiveRun) -> None:
        """Have a generation of a run started; it takes the place of the one before."""
        with self._wake:
            self.runs = [old for old in self.runs if old.paths != run.paths] + [run]
            self._later.pop(run.paths.root, None)
            self._pending.append(run)
            self._wake.notify()

    def _launch_runs(self) -> None:
        """The thread that starts runs, one after the other: it may wait for engines."""
        while True:
            with self._wake:
                while (run := self._next()) is None:
                    self._wake.wait(TICK if self._pending else None)
                self._pending.remove(run)
            try:
                self._start(run)
            except Exception as error:  # a full disk, say: this thread goes on, other runs need it
                self._give_up(run, error)

    def _next(self) -> ActiveRun | None:
        """The run to start: the first that waits for none, else the first that waited for what has ended, or that was
        stopped meanwhile. What a run that failed goes on as is before those that wait for its end."""
        for run in self._pending:
            others = [other for other in self.runs if other is not run and not other.after]
            if (
                not run.after
                or stop_requested(run, answer=False)
                or all(other.ended and other.again is None for other in others)
            ):
                run.after = False
                return run
        return None

    def _start(self, run: ActiveRun) -> None:
        try:
            launch(run, self.engines, self._idle, self.closing.is_set)
        except Exception as error:
            with self._ending:  # how a run ends with its lab is said by whoever ends that, once
                if not self.closing.is_set():
                    self._not_started(run, error)
        run.read()

    def _not_started(self, run: ActiveRun, error: Exception) -> None:
        """See to a run that could not start, or was stopped before."""
        if isinstance(error, Stopped):
            run.emit("state", state="stopped", reason="stopped before it started")
        else:
            self.log.error("launch of %s", run.paths.root, exc_info=error)
            if isinstance(error, EngineLost) and run.cluster.max_recoveries:  # before any rank was told to start
                recover(run, self.engines, Failure(0, "rank 0", "start", run.step, "lost", str(error)))
                return
            if fall_back(run, str(error)):
                return
            if isinstance(error, Lacking) and shrink(run, error.there, str(error)):
                return
            known = isinstance(error, MmlabError)
            text = str(error) if known else f"{type(error).__name__}: {error}"
            run.emit("state", state="failed", reason=text, cause="input" if known else "exception")

    def _idle(self) -> bool:
        """Whether no rank is at work (a run that waits for engines has none yet)."""
        return not any(run.engines and not run.ended for run in self.runs)

    def _state(self) -> str:
        up = len(self.engines.up())
        if up >= self.engines.wanted and self.engines.connected:
            return "ready"
        if self.engines.problem:
            return "failed"
        return "queued" if self.engines.batch and not up else "starting"

    def _write(self, state: str) -> None:
        """Write `lab.json` when it would say something new."""
        up = self.engines.up()
        cluster = self.engines.cluster
        found = {
            "id": self.config.id,
            "state": state,
            "engines": self.engines.wanted,
            "ready": len(up),
            "reason": self.reason or self.engines.problem or (self.engines.queue_state if state == "queued" else ""),
            "job": ", ".join(self.engines.job_ids),
            "keeper": self.me,
            "profile": self.config.profile,
            "profile_dir": cluster.profile_dir if cluster else None,
            "cluster_id": cluster.cluster_id if cluster else None,
            "cluster_file": cluster.cluster_file if cluster else None,
            "up": [{"engine": e.id, "pid": e.pid, "host": e.host} for e in up],
            "gone": sorted(self.engines.gone),
            "runs": [str(run.paths.root) for run in self.runs],
            "processes": [record.to_json() for record in self.engines.processes()],
            "cancel": self.engines.cancel_commands(),
        }
        if found != self._written:
            write_private(self.paths.state, found)
            self._written = found

    def _check_end(self) -> None:
        owner = self.config.owner
        if owner is not None:
            if not process_alive(int(owner["pid"]), owner["started"]):
                self._close("its process ended")
            return
        now = time.monotonic()
        if any(not run.ended for run in self.runs) or live_clients(self.paths):
            self._busy_at = now
        elif now - self._busy_at > self.config.idle_timeout:
            self._close(f"idle for {self.config.idle_timeout:g} s")

    def _close(self, reason: str) -> None:
        self.log.info("closing: %s", reason)
        self.reason = reason
        self.closing.set()

    def _finish(self) -> None:
        """Mark runs that are cut short, end every process, remove every file."""
        self.closing.set()  # also where the keeper has failed: no thread says more of a run from here on
        with self._ending:
            for run in self.runs:
                run.read()
                if not run.ended:
                    state = "stopped" if self.reason in ("closed", "its process ended") else "failed"
                    run.emit("state", state=state, reason=f"the lab ended: {self.reason}")
        self.engines.stop(CLOSE)
        left = end_all(self.engines.processes(), self.config.id)
        if left:
            self.log.error("could not end %s", left)
        for run in self.runs:
            with contextlib.suppress(OSError):
                tidy(run)
        cluster = self.engines.cluster
        if cluster is not None:
            remove_files(cluster.profile_dir, cluster.cluster_id)
        shutil.rmtree(self.paths.root, ignore_errors=True)
        os._exit(0)  # threads that wait for a stopped controller would keep the process


def _environment(config: LabConfig, me: dict[str, Any]) -> None:
    """What engines inherit: who keeps them, whose they are, and no more threads than cores between them."""
    threads = str(max(1, (os.cpu_count() or 1) // max(1, config.engines)))
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = threads
    os.environ[KEEPER] = json.dumps(me)
    os.environ[MARK] = config.id


def main() -> None:
    """Argument: the lab's folder, with `config.json` in it."""
    paths = LabPaths(Path(sys.argv[1]))
    found = read_json(paths.config)
    if found is None:
        sys.exit(f"no lab in {paths.root}")
    config = LabConfig(**found)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    log = logging.getLogger("mmlab.keeper")
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _environment(config, this_process())
    keeper = Keeper(paths, config, log)
    signal.signal(signal.SIGTERM, lambda *_: keeper._close("closed"))
    keeper.serve()


if __name__ == "__main__":
    main()
