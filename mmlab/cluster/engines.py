"""The engines of a lab, seen from its keeper: an `ipyparallel.Cluster`, who is up, and short calls to them.

Everything that may wait for the controller happens in threads of this class: a stopped controller delays what is
asked of engines, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import ipyparallel as ipp
import psutil
import zmq
from ipyparallel.util import connect
from traitlets.config import Config

from mmlab.cluster.engine import call
from mmlab.cluster.engine_info import EngineInfo, EngineLost
from mmlab.cluster.engine_main import CONNECTION
from mmlab.cluster.processes import Tracked, end_all, tracked, with_descendants
from mmlab.cluster.queue import Queue
from mmlab.cluster.registry import LabConfig, registry, remove_files
from mmlab.errors import LabError
from mmlab.messages.files import process_alive, read_json
from mmlab.messages.notices import CHAOS, Notice

TICK = 0.1
"""Seconds between looks at who has registered."""
SCAN = 2.0
"""Seconds between looks at all processes of this host, a few milliseconds each."""
CONTROLLER = 7 * 24 * 3600.0
"""Seconds that a controller which itself waits in a batch queue may take to come up."""
ANSWER = 60.0
"""Seconds in which an engine answers a call that needs no work of it."""


class Engines:
    """Keeps `wanted` engines up, one replaced when it ends; `problem` says why it cannot."""

    def __init__(self, config: LabConfig, host: str, log: logging.Logger, idle: Callable[[], bool]) -> None:
        """`idle` says whether no run is at work, so that engines may be replaced."""
        self.config = config
        self._idle = idle
        self.host = host
        self.log = log
        self.wanted = config.engines
        self.notices: list[Notice] = []
        """What is about to be taken away."""
        self.problem = ""
        self.job_ids: list[str] = []
        self.cluster: ipp.Cluster | None = None
        self._up: list[EngineInfo] = []
        self._client: ipp.Client | None = None
        self._greeted: dict[int, tuple[Any, float]] = {}
        self.gone: set[int] = set()
        self._expected: list[float] = []
        self._asked = True
        self._queue = Queue()
        self._controller: Tracked | None = None
        self._processes: list[Tracked] = []
        self._scanned = 0.0
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="mmlab-launchers", daemon=True).start()
        self._manager = threading.Thread(target=self._manage, name="mmlab-engines", daemon=True)
        self._manager.start()

    @property
    def batch(self) -> bool:
        """Whether the engines come from a batch queue, an SSH host or another profile: no time limit, other hosts."""
        return bool(self.config.profile)

    def up(self) -> list[EngineInfo]:
        """The engines that answered, live and stay, by ipyparallel's id."""
        with self._lock:
            there = [engine for engine in self._up if not self.lost(engine) and not engine.leaving(self.notices)]
        return sorted(there, key=lambda engine: engine.id)

    def lost(self, engine: EngineInfo) -> bool:
        """Whether an engine has ended, as of the last `look`."""
        return engine.id in self.gone

    def look(self) -> None:
        """Notice engines that ended: their process here is gone, or the controller says that they left."""
        client = self._client
        ids = set(client.ids) if client is not None else set()
        with self._lock:
            for engine in self._up:
                here = engine.local and not process_alive(engine.pid, engine.started)
                if here or (not engine.local and self.connected and engine.id not in ids):
                    self.gone.add(engine.id)

    @property
    def connected(self) -> bool:
        """Whether calls can reach engines: there is a controller, and it has not ended."""
        return self._client is not None and (self._controller is None or self._controller.alive)

    def ensure(self, n: int) -> None:
        """Have at least `n` engines. A batch job is submitted when somebody asks, not for every engine that ends."""
        self.wanted = max(self.wanted, n)
        self._asked = True

    def processes(self) -> list[Tracked]:
        """Every process of this host that the lab has started: controller, schedulers, engines, nannies, workers.

        Looked up every SCAN seconds; what was seen once is remembered, orphans of a killed controller too.
        """
        if time.monotonic() - self._scanned > SCAN:
            self._scanned = time.monotonic()
            self._processes = with_descendants([*self._launched(), *self._processes])
        return self._processes

    def _launched(self) -> Iterator[Tracked]:
        """What the launchers started on this host, and the engines that answered from it."""
        cluster = self.cluster
        if cluster is None:
            return
        launchers = [("controller", cluster.controller)]
        for engine_set in list(cluster.engines.values()):
            local = getattr(engine_set, "launchers", None)
            launchers += [("engine", one) for one in (list(local.values()) if local else [engine_set])]
        for kind, launcher in launchers:
            process = getattr(launcher, "process", None)
            if isinstance(process, psutil.Process) and (record := tracked(process, kind)):
                yield record
        yield from (Tracked(engine.pid, engine.started, "engine") for engine in self.up() if engine.local)

    def cancel_commands(self) -> list[list[str]]:
        """What cancels the batch jobs of this lab, for whoever cleans up after a killed keeper."""
        sets = list(self.cluster.engines.values()) if self.cluster is not None else []
        launchers = [*sets, self.cluster.controller] if self.cluster is not None else []
        return [
            [*launcher.delete_command, launcher.job_id]
            for launcher in launchers
            if getattr(launcher, "job_id", "") and hasattr(launcher, "delete_command")
        ]

    # calls to engines, from any thread that may wait

    def call(
        self, engines: Sequence[EngineInfo], method: str, arguments: Sequence[tuple[Any, ...]], timeout: float
    ) -> list[Any]:
        """Call a method of several engines at once, each with its own arguments; results in their order.

        LabError when one ends, raises, or does not answer within `timeout` seconds.
        """
        client = self._client
        if client is None or not self.connected:
            raise LabError("the engines are not connected: the controller has ended, or not started yet")
        results = []
        for engine, its in zip(engines, arguments, strict=True):
            try:
                results.append(client[engine.id].apply_async(call, method, *its))
            except IndexError:  # the controller has seen it leave, `look` has not yet
                raise EngineLost(engine, f"ended before {method}") from None
        end = time.monotonic() + timeout
        for engine, result in zip(engines, results, strict=True):
            while not result.ready():
                if self.lost(engine):
                    raise EngineLost(engine, f"ended during {method}")
                if time.monotonic() > end or self._end.is_set():
                    raise LabError(
                        f"engine {engine.id} (pid {engine.pid} on {engine.host}) did not answer {method} within "
                        f"{timeout:g} s: a cell may keep it busy, or the controller has stopped"
                    )
                result.wait(0.05)
        return [self._result(engine, method, result) for engine, result in zip(engines, results, strict=True)]

    def _result(self, engine: EngineInfo, method: str, result: Any) -> Any:
        try:
            return result.get(0)
        except ipp.error.RemoteError as error:
            if error.ename == "EngineError":  # the hub's answer for an engine that died, before its notice arrives
                raise EngineLost(engine, f"ended during {method}") from None
            raise LabError(f"engine {engine.id}: {error.ename} in {method}: {error.evalue}") from None
        except ipp.error.IPythonError as error:
            raise LabError(f"engine {engine.id} ended during {method}: {error}") from None

    def kill(self, engine: EngineInfo) -> None:
        """End an engine's process, on this host also one that is stopped; another one takes its place."""
        self.log.warning("ending engine %s (pid %s on %s)", engine.id, engine.pid, engine.host)
        if engine.local:
            with contextlib.suppress(psutil.Error):
                if process_alive(engine.pid, engine.started):
                    psutil.Process(engine.pid).kill()
        else:
            with contextlib.suppress(LabError):  # it ended: no answer is the answer
                self.call([engine], "end", [()], 10.0)
        self.gone.add(engine.id)

    def take_away(self) -> None:
        """End the engines of which `run.chaos` has announced the end, once their time has come."""
        for notice in self.notices:
            if notice.source == CHAOS and time.time() > notice.deadline:
                for engine in list(self._up):
                    if engine.local and not self.lost(engine) and engine.leaving([notice]):
                        self.kill(engine)

    # the managing thread

    def _manage(self) -> None:
        while not self._end.is_set():
            try:
                self._tick()
            except Exception as error:  # a launcher's own errors are of any kind: the lab's problem, not its end
                if not self._end.is_set():
                    self.log.exception("engines")
                    self.problem = self._explain(error)
                self._end.wait(5.0)
            self._end.wait(TICK)

    def _tick(self) -> None:
        if self._controller is not None and not self._controller.alive:
            if not self._idle():
                return  # ranks do not need it; all is made anew when the run has ended
            self._forget_cluster()
        if self.cluster is None:
            self._start_cluster()
        self._reap()
        missing = self.wanted - len(self.up()) - len(self._expected)
        if missing > 0 and (self._asked or not self.batch) and not self._end.is_set():
            self._asked = False
            self._start_engines(missing)
        if self._client is None:
            self._connect()
        else:
            self._greet(self._client)

    def _run(self, coroutine: Coroutine[Any, Any, Any], timeout: float) -> Any:
        """Run one of the cluster's coroutines in the launchers' loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout)

    def _start_cluster(self) -> None:
        more = Config()
        more.EngineLauncher.engine_cmd = [sys.executable, "-m", "mmlab.cluster.engine_main"]
        arguments: dict[str, Any] = {"cluster_id": f"mmlab-{self.config.id}", "delay": 0.0, "config": more}
        if self.batch:
            # engines on other hosts: reachable, therefore encrypted; and a queue may take hours
            arguments |= {"profile": self.config.profile, "controller_ip": "*", "engine_timeout": 2**31 - 1}
            arguments |= {"controller_args": ["--IPController.enable_curve=True"]}
            more.ControllerLauncher.connection_info_timeout = -1.0
            more.BatchSystemLauncher.batch_file_name = str(registry() / self.config.id / "job.sh")
        else:
            arguments |= {"profile": "default", "engines": "local", "controller": "local", "load_profile": False}
            arguments |= {
                "send_engines_connection_env": False,
                "controller_args": ["--IPController.broadcast_scheduler_depth=0"],
            }
            more.LocalEngineSetLauncher.delay = 0.0

        async def start() -> ipp.Cluster:
            cluster = ipp.Cluster(shutdown_atexit=False, log=self.log, parent=None, **arguments)
            await cluster.start_controller()
            return cluster

        cluster = self._run(start(), ANSWER)
        process = getattr(cluster.controller, "process", None)
        self._controller = tracked(process, "controller") if isinstance(process, psutil.Process) else None
        if not self.batch:
            os.environ[CONNECTION] = str(self._connection_file(cluster, "engine"))
        self.cluster = cluster

    def _forget_cluster(self) -> None:
        """End what is left of a cluster whose controller has ended; the next tick starts another.

        LabError when it never came up, with the end of what it said.
        """
        assert self.cluster is not None
        never_up = self._client is None
        said = self.cluster.controller.get_output().strip()[-1000:] if never_up else ""
        self.log.warning("the controller ended; all engines are started anew")
        self._scanned = 0.0
        end_all(self.processes(), "")
        remove_files(self.cluster.profile_dir, self.cluster.cluster_id)
        with self._lock:
            client, self._client, self.cluster, self._controller = self._client, None, None, None
            self._up, self._greeted, self.gone, self._expected = [], {}, set(), []
        if client is not None:
            client.close()
        if never_up:
            raise LabError(f"the controller ended while it started, and said:\n{said}")

    def _connection_file(self, cluster: ipp.Cluster, side: str) -> Path:
        return Path(cluster.profile_dir, "security", f"ipcontroller-{cluster.cluster_id}-{side}.json")

    def _start_engines(self, n: int) -> None:
        assert self.cluster is not None
        try:
            set_id = self._run(self.cluster.start_engines(n), CONTROLLER if self.batch else ANSWER)
        except RuntimeError:  # the controller ended while its connection file was waited for
            if self._controller is not None and not self._controller.alive:
                self._forget_cluster()
            raise
        engine_set = self.cluster.engines[set_id]
        job = getattr(engine_set, "job_id", "")
        if job:
            self.job_ids.append(str(job))
            self._queue = Queue(slurm="slurm" in type(engine_set).__name__.lower())
        self._expected += [time.monotonic()] * n

    def _connect(self) -> None:
        """Connect the client as soon as the controller has said where it listens."""
        assert self.cluster is not None
        paths = [self._connection_file(self.cluster, side) for side in ("client", "engine")]
        if all(read_json(path) for path in paths):
            self._client = ipp.Client(str(paths[0]), timeout=ANSWER)

    def _greet(self, client: ipp.Client) -> None:
        """Ask who registered; those that answer are up."""
        known = {engine.id for engine in self._up}
        for identity in set(client.ids) - known - set(self._greeted) - self.gone:
            with contextlib.suppress(IndexError):  # it has left
                self._greeted[identity] = (client[identity].apply_async(call, "hello"), time.monotonic())
        for identity, (result, asked) in list(self._greeted.items()):
            if not result.ready():
                if time.monotonic() - asked > ANSWER:
                    del self._greeted[identity]
                    self.gone.add(identity)
                continue
            del self._greeted[identity]
            try:
                who = result.get(0)
                client[identity].apply_async(call, "warm", self.config.worker)
            except (IndexError, ipp.error.IPythonError) as error:
                if isinstance(error, ipp.error.RemoteError) and error.ename != "EngineError":
                    raise  # what each engine would fail with
                self.gone.add(identity)  # it ended at once: another one is started in its place
            else:
                engine = EngineInfo(identity, who["pid"], who["started"], who["host"], who["host"] == self.host)
                with self._lock:
                    self._up.append(engine)
                self.problem = ""
            del self._expected[:1]

    def _reap(self) -> None:
        """Forget engines that ended, tell the controller, and give up on local ones that never came."""
        for engine in [engine for engine in self._up if self.lost(engine)]:
            with self._lock:
                self._up.remove(engine)
            self.gone.add(engine.id)
            self.log.warning("engine %s (pid %s on %s) ended", engine.id, engine.pid, engine.host)
            if not self.batch and self._client is not None and engine.id in self._client.ids:
                self._unregister(engine.id)
        if not self._expected:
            return
        if not self.batch and time.monotonic() - self._expected[0] > self.config.start_timeout:
            self._expected.clear()
            raise LabError(f"engines did not start within {self.config.start_timeout:g} s; see {self._engine_logs()}")
        if self.job_ids and self._queue.left(self.job_ids[-1]):
            self._expected.clear()
            raise LabError(f"job {self.job_ids[-1]} left the queue without engines; see {self._engine_logs()}")

    @property
    def queue_state(self) -> str:
        """What the batch system says about the newest job, such as "PENDING (Resources)"; empty where unknown."""
        return self._queue.state

    def _unregister(self, identity: int) -> None:
        """Tell the controller that an engine left, as a nanny would; else 30 s of missed heartbeats pass."""
        assert self.cluster is not None
        assert self._client is not None
        info = json.loads(self._connection_file(self.cluster, "engine").read_bytes())
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        socket.LINGER = 1000
        with contextlib.closing(socket):
            connect(socket, f"{info['interface']}:{info['registration']}")
            self._client.session.send(socket, "unregistration_request", content={"id": identity})

    def _engine_logs(self) -> str:
        cluster = self.cluster
        return f"{cluster.profile_dir}/log/ipengine-{cluster.cluster_id}-*.log" if cluster else "the keeper's log"

    def _explain(self, error: Exception) -> str:
        if isinstance(error, LabError):
            return str(error)
        if isinstance(error, FileNotFoundError):
            return f"{error.filename or error} was not found: is the batch system's command on PATH?"
        return f"{type(error).__name__}: {error}"

    def stop(self, timeout: float) -> None:
        """Start nothing more, and end what runs elsewhere (batch jobs); local processes are ended by their keeper."""
        self._end.set()
        self._manager.join(timeout)
        if self.cluster is None or not self.batch:
            return
        with contextlib.suppress(Exception):  # the jobs may have ended by themselves
            self._run(self.cluster.stop_engines(), timeout)
        with contextlib.suppress(Exception):
            self._run(self.cluster.stop_controller(), timeout)
