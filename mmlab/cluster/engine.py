"""What runs in an engine: a training thread, and short calls in the main thread, which therefore stays free for cells.

The keeper sends `call(method, *arguments)` through ipyparallel. The one `Engine` of the process lives in the engine's
user namespace under the name `mmlab_engine`, so a cell can look at it too: `%px mmlab_engine.job`. Its `session` is the
live one (`mmlab.train.session.Session`: plan, mesh, `built.part` the model); `%%rank` and `%%ranks` give names to what
is in it (see `mmlab.cluster.cells`).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
import threading
import traceback
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmlab.cluster.streams import EngineStream, RankLog
from mmlab.errors import LabError
from mmlab.messages import ENDED, Failure, RunPaths, process_started, write_failure
from mmlab.messages.events import last_state
from mmlab.messages.notices import SIGNALS, Notice, write_notice
from mmlab.train.spot import expendable

if TYPE_CHECKING:
    from mmlab.train.job import Job

NAME = "mmlab_engine"
"""Name of the engine's object in its user namespace."""
WORKER = "mmlab.train.worker"
"""The module that trains: its `run_worker(job, show=...)` calls `show(session)` once there is something to look at, and
returns when the rank has finished or failed; its `open_store(host)` opens the rendezvous store and returns (host, port,
store)."""


class Engine:
    """One engine: at most one training thread at a time."""

    def __init__(self) -> None:
        self.job: Job | None = None
        self.thread: threading.Thread | None = None
        self.store: Any = None
        self._warming: threading.Thread | None = None
        self._session: weakref.ref[Any] | None = None
        self._signals: dict[int, Any] = {}
        """What handled SIGTERM and SIGUSR1 before."""
        self._leaving = 0
        """The signal on which the process ends once its rank has left the run; 0 for none."""

    def hello(self) -> dict[str, Any]:
        """Who this engine is: {"pid", "started", "host"}."""
        pid = os.getpid()
        return {"pid": pid, "started": process_started(pid), "host": socket.gethostname()}

    def warm(self, worker: str = WORKER) -> None:
        """Import what training needs, in a thread, so that the first run does not wait for it."""
        self._warming = threading.Thread(target=importlib.import_module, args=(worker,), name="mmlab-warm", daemon=True)
        self._warming.start()

    def warmed(self) -> bool:
        """Whether those imports are over."""
        return self._warming is not None and not self._warming.is_alive()

    def open_store(self, host_hint: str = "", worker: str = WORKER) -> tuple[str, int]:
        """Open the rendezvous store of a run on rank 0's engine; (host, port) where the other ranks reach it."""
        self.store = None  # drops the last run's, and frees its port
        host, port, self.store = importlib.import_module(worker).open_store(host_hint)
        return host, port

    def start(self, job: dict[str, Any], worker: str = WORKER) -> None:
        """Start the training thread of a rank. LabError while one is at work."""
        if self.busy:
            raise LabError(f"engine {os.getpid()} still trains rank {self.job.rank if self.job else '?'}")
        from mmlab.train.job import Job

        self._hear_signals()
        self.job = Job(**job)
        log = RankLog(RunPaths(Path(self.job.run_dir)).log(self.job.rank))
        streams = [stream for stream in (sys.stdout, sys.stderr) if isinstance(stream, EngineStream)]
        for stream in streams:
            stream.route(log)
        self.thread = threading.Thread(
            target=self._train, args=(self.job, worker, log, streams), name="mmlab-train", daemon=True
        )
        self.thread.start()

    def _train(self, job: Job, worker: str, log: RankLog, streams: list[EngineStream]) -> None:
        try:
            importlib.import_module(worker).run_worker(job, show=self._show)
        except BaseException as error:  # the worker reports its own failures; this is what it could not
            message = f"{type(error).__name__}: {error}"
            failure = Failure(job.rank, f"rank {job.rank}", "start", 0, "exception", message, traceback.format_exc())
            write_failure(RunPaths(Path(job.run_dir)).failures, job.generation, failure)
            log.write(failure.details.encode())
        finally:
            for stream in streams:
                stream.unroute()
            log.close()
            if job.rank == 0:
                self.store = None
            if self._leaving == signal.SIGTERM:
                os._exit(128 + signal.SIGTERM)
            self._leaving = 0

    def _show(self, session: Any) -> None:
        self._session = weakref.ref(session)  # weakly: what a generation held is to be gone after its end

    @property
    def session(self) -> Any:
        """What the training thread holds (`mmlab.train.session.Session`); None while none trains."""
        return self._session() if self._session is not None and self.busy else None

    def _hear_signals(self) -> None:
        """From now on a signal that announces the end of the process (Kubernetes, Slurm) is a notice to the run."""
        if threading.current_thread() is threading.main_thread() and not self._signals:
            for number in SIGNALS:
                self._signals[number] = signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: Any) -> None:
        """Leave a notice; where no run is at work, at a second signal, or where that fails, what was there before."""
        if self.busy and not self._leaving and self.job is not None:
            paths = RunPaths(Path(self.job.run_dir))
            name = signal.Signals(number).name
            notice = Notice("leave", name, socket.gethostname(), os.getpid())
            with contextlib.suppress(OSError):
                if last_state(paths.events) not in ENDED:  # else its lab is being closed
                    write_notice(paths, notice)
                    self._leaving = number
                    return
        before = self._signals[number]
        if callable(before):
            before(number, frame)
        elif number == signal.SIGTERM:
            os._exit(128 + number)

    def expendable(self, notices: str) -> bool:
        """Whether this host may be taken away at any time; `notices` says whose metadata server to ask."""
        return expendable(notices)

    @property
    def busy(self) -> bool:
        """Whether a training thread is at work."""
        return self.thread is not None and self.thread.is_alive()

    def state(self, run_dir: str) -> dict[str, Any]:
        """Whether a training thread is at work, and whether this host sees a run's folder: {"busy", "sees"}."""
        return {"busy": self.busy, "sees": RunPaths(Path(run_dir)).run.is_file()}

    def end(self) -> None:
        """End the process at once: the way out for a training thread that does not come back."""
        os._exit(1)


def call(method: str, *arguments: Any) -> Any:
    """Run a method of this process's `Engine`, which is made at the first call."""
    from IPython import get_ipython

    shell = get_ipython()
    engine = shell.user_ns.setdefault(NAME, Engine())
    return getattr(engine, method)(*arguments)
