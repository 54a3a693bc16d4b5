"""`Lab` and `Run`: the one set of verbs. Everything here reads files and leaves requests; nothing computes.

One exception to the layers: a shell is taught to show runs by `mmlab.ui`, which lies above, so that module is loaded by
name (as in `mmlab.shown`). Static imports still point down only.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, overload

from mmlab.cluster import registry
from mmlab.cluster.browsing import Browsed
from mmlab.cluster.client import LabView, check_profile
from mmlab.cluster.registry import CLOSE, LabPaths
from mmlab.errors import LabError, MmlabError, PlanError
from mmlab.messages import Command, EventLog, RunPaths, read_json
from mmlab.messages.events import last_state
from mmlab.messages.runs import create_run, runs_root
from mmlab.plan import Plan, check_platform
from mmlab.plan.tables import html_table
from mmlab.shown import Shown, ShownLab
from mmlab.tracking.bottleneck import Bottleneck
from mmlab.tracking.compression import CompressionTable
from mmlab.tracking.doctor import Diagnosis, diagnose
from mmlab.tracking.ledger import Ledger
from mmlab.tracking.progress import current_shell, in_kernel, report_unseen
from mmlab.tracking.record import ENDED, RunRecord, list_runs
from mmlab.tracking.sent import WaitTimeout
from mmlab.tracking.traffic import TrafficTable
from mmlab.tracking.waiting import POLL, next_generation, reached, wait_for

WORKER = "mmlab.train.worker"
"""The module that trains (see `mmlab.cluster.engine`)."""
ENGINES = 6
"""Engines of a lab that is not told how many: the quickstart plan's."""
STOP = 30.0
"""Seconds that an unfinished run gets to stop when a `with` block ends, before its lab is closed."""


class Run(Shown, Browsed):
    """A run: looks at it and steers it, live or not, from any process that sees its folder."""

    def __init__(self, run_dir: str | Path, lab: Lab | None = None) -> None:
        self._record = RunRecord(run_dir)
        self._lab = lab
        self._seen_failed = False

    @classmethod
    def open(cls, run: str | Path) -> Run:
        """A run by its folder, or by its name among the runs of MMLAB_RUNS (else ./runs) and of live labs."""
        path = Path(run)
        known = [Path(folder) for lab in Lab.live() for folder in lab.info().get("runs", [])]
        candidates = [path, runs_root() / path, *(folder for folder in known if folder.name == path.name)]
        for candidate in candidates:
            if (candidate / "run.json").is_file():
                _teach_shell()
                return cls(candidate)
        raise MmlabError(f"no run {run}: neither a run's folder nor a name in {runs_root()}; `mmlab runs` lists them")

    # looking

    @property
    def dir(self) -> Path:
        """The folder of the run."""
        return self._record.paths.root

    @property
    def id(self) -> str:
        """The name of the run: its folder's."""
        return self._record.id

    @property
    def plan(self) -> Plan:
        """The plan that the run was started with, or that a relayout has made of it."""
        return self._record.plan

    def status(self) -> dict[str, Any]:
        """{"state", "step", "steps", "reason", "ranks": [{"rank", "role", "engine", "pid", "host", "alive"}], ...}.

        `state` is queued, starting, running, paused, failed, finished or stopped.
        """
        status = self._record.status()
        self._seen_failed |= status["state"] == "failed"
        return status

    def events(self) -> list[dict[str, Any]]:
        """All events of the run, oldest first."""
        return self._record.events()

    def metrics(self) -> list[dict[str, Any]]:
        """One dict a step of the current lineage: "step", "loss", "lr" {module: x}, "grad_norm", "tokens_per_s", ..."""
        return self._record.metrics()

    @overload
    def log(self, rank: int, follow: Literal[False] = False, lines: int | None = None) -> str: ...

    @overload
    def log(self, rank: int, follow: Literal[True]) -> Iterator[str]: ...

    def log(self, rank: int, follow: bool = False, lines: int | None = None) -> str | Iterator[str]:
        """What a rank printed; with `follow`, an iterator over its lines as they come, until the run has ended."""
        return self._record.follow_log(rank) if follow else self._record.log(rank, lines)

    def traffic(self) -> TrafficTable:
        """Who talks to whom: groups of ranks, bytes a step as counted, time under way and waited for; a table."""
        return self._record.traffic()

    def ledger(self) -> Ledger:
        """Which samples each step consumed; shows as a proof that none was lost and none came twice, or as what is
        wrong. `ledger().samples(step)` names those of a step."""
        return self._record.ledger()

    def compression(self) -> CompressionTable:
        """How gradients are compressed, by module: bytes a step beside those without, time, what is left out, how far
        off they were when last measured; a table."""
        return self._record.compression()

    def diagnose(self) -> Bottleneck:
        """What makes steps slow, in one sentence: data, encoder, pipeline, communication or optimizer, with the times
        of the last steps and what to try; a table of all of them. (`doctor` is for a run that is stuck.)"""
        return self._record.bottleneck()

    def doctor(self) -> Diagnosis:
        """What holds the run up: which rank has not joined which call of which group, and where in its code it is.

        Looks from outside and takes a second or two; for live runs, also when the kernel that started them is dead.
        """
        return diagnose(self._record)

    def __repr__(self) -> str:
        status = self.status()
        reason = f": {status['reason']}" if status["reason"] else ""
        return f"<Run {self.id}: {status['state']}, step {status['step']} of {status['steps']}{reason}>"

    # steering: see Steered; checkpoints: see Browsed

    def _bring(self, n: int, command: Command) -> bool:
        return registry.bring(self._record.info, self.dir, n, command)

    def _home(self) -> Lab:
        """The lab that can start this run again."""
        if self._lab is not None and self._lab.status()["state"] != "ended":
            return self._lab
        root = (self._record.info.get("lab") or {}).get("root")
        for lab in Lab.live():
            if str(lab._paths.root) == root:
                return lab
        return Lab.attach()

    # waiting

    def wait(self, step: int | None = None, timeout: float | None = None, progress: bool = True) -> Run:
        """Wait until the run has ended, or has done `step` steps. The only verb that blocks; returns the run.

        Interrupting it stops the waiting, not the run. RunFailed when the run fails or is deleted, WaitTimeout after
        `timeout` seconds.
        """
        wait_for(self._record, self.status, step, timeout, progress)
        return self

    def __await__(self) -> Generator[Any, None, Run]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> Run:
        while not reached(self._record, self.status()):
            await asyncio.sleep(POLL)
        return self


class Lab(ShownLab):
    """A set of engines for runs. Making one returns at once; the engines start meanwhile."""

    def __init__(
        self,
        engines: int | None = None,
        profile: str = "",
        *,
        idle_timeout: float | None = None,
        start_timeout: float | None = None,
        outlive: bool | None = None,
        worker: str = WORKER,
    ) -> None:
        """`engines` to start (more are started when a plan needs them); `profile` an ipyparallel profile by name, empty
        for local engines.

        `outlive`: whether the lab lives on when this process ends; default: in a kernel. Such a lab ends itself after
        `idle_timeout` seconds without run or client. `start_timeout` in seconds, for local engines. Both default to
        those of the plan that is trained. LabError when it cannot be started.
        """
        check_platform()
        if engines is not None and (not isinstance(engines, int) or isinstance(engines, bool) or engines < 1):
            raise LabError(f"a lab needs at least one engine, a whole number, not {engines!r}")
        check_profile(profile)
        registry.clean_leftovers()
        outlive = in_kernel() if outlive is None else outlive
        limits = {"idle_timeout": idle_timeout, "start_timeout": start_timeout}
        self._open(registry.start_keeper(registry.new_config(engines or ENGINES, profile, outlive, worker, **limits)))

    def _open(self, paths: LabPaths) -> None:
        self._paths = paths
        self._view: LabView | None = None
        self._config = read_json(paths.config) or {}
        self.run: Run | None = None
        """The newest run of this lab; None before the first."""
        _teach_shell()

    @classmethod
    def attach(cls, id: str = "") -> Lab:
        """The only live lab, or the one of that id. LabError lists them when it is not clear which."""
        found = [paths for paths in registry.live_labs() if not id or paths.root.name == id]
        if len(found) != 1:
            live = ", ".join(str(lab) for lab in cls.live()) or "none; start one with mmlab.Lab()"
            which = f"no lab {id}" if id else "several labs live" if found else "no lab lives"
            raise LabError(f"{which}; live labs: {live}" + ("; attach(id) takes one of them" if found else ""))
        registry.attach_client(found[0])
        return cls._of(found[0])

    @classmethod
    def _of(cls, paths: LabPaths) -> Lab:
        lab = cls.__new__(cls)
        lab._open(paths)
        lab.run = next((Run(folder, lab) for folder in reversed(lab._folders())), None)
        return lab

    def _folders(self) -> list[Path]:
        """Folders of this lab's runs, oldest first; without those that were deleted, or that another lab has now."""
        folders = [Path(folder) for folder in self.info().get("runs", [])]
        if self.run is not None and registry.owns(self._paths, self.run.dir):  # its keeper may not have listed it yet
            folders.append(self.run.dir)
        return list(dict.fromkeys(folders))

    @property
    def current(self) -> Run | None:
        """The run at work: the newest that is neither queued nor over, else the newest; None before the first."""
        folders = self._folders()
        at_work = [f for f in folders if last_state(RunPaths(f).events) not in ("queued", *ENDED)]
        return next((Run(folder, self) for folder in reversed(at_work or folders)), None)

    @classmethod
    def live(cls) -> list[Lab]:
        """All live labs of this user, oldest first; not counted as their client."""
        registry.clean_leftovers()
        return [cls._of(paths) for paths in registry.live_labs()]

    @property
    def id(self) -> str:
        """The lab's short name."""
        return self._paths.root.name

    def info(self) -> dict[str, Any]:
        """What the keeper last wrote: state, engines, processes, the lab's runs ({} before it wrote anything)."""
        return registry.read_info(self._paths)

    def status(self) -> dict[str, Any]:
        """{"id", "state": queued | starting | ready | failed | ended, "engines": n, "ready": k, "job", "reason"}."""
        return registry.status(self._paths, self._config)

    def wait(self, timeout: float | None = None) -> Lab:
        """Wait until all engines are up. LabError when they cannot be had, WaitTimeout after `timeout` seconds."""
        end = None if timeout is None else time.monotonic() + timeout
        while (status := self.status())["state"] != "ready":
            if status["state"] in ("failed", "ended"):
                raise LabError(f"lab {self.id} {status['state']}: {status['reason'] or 'its engines are gone'}")
            if end is not None and time.monotonic() > end:
                raise WaitTimeout(
                    f"lab {self.id}: {status['ready']} of {status['engines']} engines up in {timeout:g} s"
                )
            time.sleep(POLL)
        return self

    def grow(self, engines: int) -> Lab:
        """Have more engines, `engines` in all; returns once the lab has noted it, `wait()` waits for them. The run at
        work goes on; a relayout can take them in. LabError for fewer, and without an answer of the lab within 5 s.
        """
        registry.grow(self._paths, engines)
        return self

    def train(self, plan: Plan | str | Path) -> Run:
        """Start a run and return it at once; engines that the plan needs and the lab lacks are started.

        PlanError when the plan has problems or the run's folder cannot be written; LabError when the lab has ended or
        is busy with another run.
        """
        plan = plan if isinstance(plan, Plan) else Plan.load(plan)
        plan.check().raise_if_any()
        self._check_fits(plan)
        self._check_free()
        paths = create_run(runs_root(), plan.name, plan.dumps(), plan.world_size, plan.train.steps)
        run = Run(paths.root, self)
        self._launch(run, restore=None)
        return run

    def _check_fits(self, plan: Plan) -> None:
        """PlanError for a plan of another profile, LabError where this lab has ended."""
        if plan.cluster.profile not in ("", self._config.get("profile", "")):
            name = plan.cluster.profile
            raise PlanError(f'cluster.profile = "{name}": this lab is of another; use mmlab.Lab(profile="{name}")')
        self._check_lives()

    def _check_lives(self) -> None:
        if self.status()["state"] == "ended":
            raise LabError(f"lab {self.id} has ended; start another with mmlab.Lab()")

    def _busy_with(self, restarted: Path | None = None) -> list[Run]:
        """The runs that have this lab, or wait for it, and have not been told to stop; in the order of their turns."""
        runs = [Run(folder) for folder in self._folders() if folder != restarted]
        return [run for run in runs if not run._record.stopping() and run.status()["state"] not in ENDED]

    def _check_free(self, restarted: Path | None = None) -> None:
        self._check_lives()
        if busy := self._busy_with(restarted):
            raise LabError(
                f"lab {self.id} is busy with run {busy[0].id}; run.stop() and run.wait() first, or Lab() anew"
            )

    def _launch(self, run: Run, restore: str | None, queue: bool = False) -> None:
        """Have the keeper start the next generation of a run; with `queue`, when what has the lab has ended."""
        if queue:
            self._check_lives()
        else:
            self._check_free(run.dir)
        before = self._busy_with(run.dir) if queue else []
        lab = {"root": str(self._paths.root), "host": registry.this_process()["host"]}
        generation = next_generation(run._record, lab)
        run._seen_failed = False
        self.run = run
        limits = {name: getattr(run.plan.cluster, name) for name in ("idle_timeout", "start_timeout")}
        arguments = {"run_dir": str(run.dir), "generation": generation, "restore": restore, "limits": limits}
        if before:
            log = EventLog(run._record.paths.events)
            reason = "waits for the end of " + " and of ".join(f"run {each.id}" for each in before)
            log.emit("state", state="queued", step=0, reason=reason)
            log.close()
        registry.ask(self._paths, "launch", **arguments, after=bool(before))
        if in_kernel() and (shell := current_shell()) is not None:
            report_unseen(shell, run._record, lambda: run._seen_failed)

    def runs(self) -> list[Run]:
        """The runs of MMLAB_RUNS (else ./runs), newest first, and those of this lab that are elsewhere."""
        records = [record.paths.root for record in list_runs()]
        return [Run(f, self) for f in dict.fromkeys([*records, *self._folders()])]

    @property
    def view(self) -> Any:
        """The ipyparallel DirectView of the engines: in rank order of the run at work while its engines live, else all.

        LabError when they cannot be reached.
        """
        self._view = self._view or LabView()
        run = self.current
        return self._view.of(self.info(), run._record.info.get("engines", []) if run is not None else [])

    def close(self, timeout: float = CLOSE) -> None:
        """End the engines and everything the lab has started; a live run ends with it. No process is left."""
        if self._view is not None:
            self._view.close()
            self._view = None
        registry.end_lab(self._paths, self.info(), timeout)

    def __enter__(self) -> Lab:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop what is unfinished, then close."""
        try:
            folders = [folder for folder in self._folders() if last_state(RunPaths(folder).events) not in ENDED]
            unfinished = [Run(folder, self) for folder in folders[::-1]]  # what is queued first
            for run in unfinished:
                with contextlib.suppress(MmlabError):  # it has ended
                    run.stop()
            for run in unfinished:
                with contextlib.suppress(MmlabError):
                    run.wait(timeout=STOP, progress=False)
        finally:  # an impatient Ctrl-C too leaves nothing behind
            self.close()

    def __repr__(self) -> str:
        return f"<Lab {registry.status_text(self.status())}>"

    def _repr_html_(self) -> str:
        status = self.status()
        rows = [[name, str(status[name])] for name in ("state", "job", "reason") if status[name]]
        rows.append(["engines", f"{status['ready']} of {status['engines']} up"])
        rows.append(["newest run", repr(self.run) if self.run is not None else "none yet: lab.train(plan)"])
        return html_table(["lab", self.id], rows)


def _teach_shell() -> None:
    """In a kernel: make a run that is a cell's last expression show its dashboard."""
    if in_kernel():
        importlib.import_module("mmlab.ui.shell").install(current_shell())
