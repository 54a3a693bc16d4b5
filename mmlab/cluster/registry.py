"""Where labs are written down: one private folder each under Jupyter's runtime folder, so any process finds them.

`config.json` what was asked (written by whoever makes the lab), `lab.json` what is (written by the keeper),
`control/` requests to the keeper, `clients/` a file for each process that uses the lab, `keeper.log`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil
from jupyter_core.paths import jupyter_runtime_dir

from mmlab.cluster.processes import MARK, Tracked, end_all
from mmlab.errors import LabError
from mmlab.messages import ENDED, Command, EventLog, RunPaths
from mmlab.messages.events import last_events, last_of
from mmlab.messages.files import process_alive, process_started, read_json
from mmlab.plan.schema import ClusterConfig

BIRTH = 60.0
"""Seconds after which a lab whose keeper has not written `lab.json` counts as dead."""
CLOSE = 30.0
"""Seconds that a lab gets to end by itself."""
NOTED = 5.0
"""Seconds in which a keeper, which looks every 0.1 s, takes note of a request."""
_DETACH = (
    "import os, sys\n"
    "if os.fork(): os._exit(0)\n"  # the keeper is nobody's child: no zombie, no ResourceWarning in whoever made the lab
    "os.execv(sys.executable, [sys.executable, '-m', 'mmlab.cluster.keeper', sys.argv[1]])\n"
)


@dataclass(frozen=True)
class LabConfig:
    """What a lab was asked to be.

    `engines` wanted at the start; `profile` an ipyparallel profile, empty for local engines; `owner` the process whose
    end ends the lab ({"pid", "started"}), None for a lab that outlives it; `idle_timeout` and `start_timeout` in
    seconds (`start_timeout` holds for local engines, batch queues wait without limit); `worker` the module
    that trains; `fixed` the fields that a plan does not change.
    """

    id: str
    engines: int
    profile: str
    owner: dict[str, float] | None
    idle_timeout: float
    start_timeout: float
    worker: str
    created: float
    fixed: tuple[str, ...] = ()


@dataclass(frozen=True)
class LabPaths:
    """The folder of one lab."""

    root: Path

    @property
    def config(self) -> Path:
        """What was asked (JSON)."""
        return self.root / "config.json"

    @property
    def state(self) -> Path:
        """What is (JSON), written by the keeper."""
        return self.root / "lab.json"

    @property
    def control(self) -> Path:
        """Requests to the keeper, one JSON file each."""
        return self.root / "control"

    @property
    def clients(self) -> Path:
        """One file for each process that uses the lab."""
        return self.root / "clients"

    @property
    def log(self) -> Path:
        """What the keeper and ipyparallel's launchers say."""
        return self.root / "keeper.log"


def registry() -> Path:
    """The folder of all labs of this user."""
    return Path(jupyter_runtime_dir()) / "mmlab" / "labs"


def write_private(path: Path, value: Any) -> None:
    """Write JSON that only this user can read, whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump(value, file, indent=1)
    os.replace(temporary, path)


def this_process() -> dict[str, Any]:
    """{"pid", "started", "host"} of this process."""
    pid = os.getpid()
    return {"pid": pid, "started": process_started(pid), "host": socket.gethostname()}


def new_config(engines: int, profile: str, outlive: bool, worker: str, **limits: float | None) -> LabConfig:
    """What a lab of this process is asked to be; `limits`: idle_timeout and start_timeout, None for a plan's."""
    me = this_process()
    own = {name: value for name, value in limits.items() if value is not None}
    cluster = ClusterConfig()
    return LabConfig(
        id=new_id(),
        engines=engines,
        profile=profile,
        owner=None if outlive else {"pid": me["pid"], "started": me["started"]},
        idle_timeout=own.get("idle_timeout", cluster.idle_timeout),
        start_timeout=own.get("start_timeout", cluster.start_timeout),
        worker=worker,
        created=time.time(),
        fixed=tuple(own),
    )


def start_keeper(config: LabConfig) -> LabPaths:
    """Write a lab down and start its keeper in a session of its own. LabError when the folder cannot be written."""
    paths = LabPaths(registry() / config.id)
    try:
        for folder in (paths.root, paths.control, paths.clients):
            folder.mkdir(parents=True, mode=0o700)
        write_private(paths.config, asdict(config))
        attach_client(paths)
        log = os.open(paths.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    except OSError as error:
        raise LabError(f"a lab cannot be written to {paths.root}: {error.strerror}; set JUPYTER_RUNTIME_DIR") from None
    try:
        subprocess.run(
            [sys.executable, "-I", "-S", "-c", _DETACH, str(paths.root)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {MARK: config.id},
            start_new_session=True,
            check=True,
            timeout=30,
        )
    except (OSError, subprocess.SubprocessError) as error:
        shutil.rmtree(paths.root, ignore_errors=True)
        raise LabError(f"the keeper of the lab could not be started: {error}") from None
    finally:
        os.close(log)
    return paths


def new_id() -> str:
    """A short id that no other lab of this user has."""
    while (registry() / (found := secrets.token_hex(3))).exists():
        pass
    return found


def attach_client(paths: LabPaths) -> None:
    """Write down that this process uses the lab, which therefore is not idle; nothing where it has just ended."""
    me = this_process()
    with contextlib.suppress(FileNotFoundError):
        write_private(paths.clients / f"{me['host']}-{me['pid']}.json", me)


def detach_client(lab_id: str) -> None:
    """Write down that this process does not use a lab any longer."""
    me = this_process()
    (LabPaths(registry() / lab_id).clients / f"{me['host']}-{me['pid']}.json").unlink(missing_ok=True)


def live_clients(paths: LabPaths) -> int:
    """How many processes of this host use the lab; the files of dead ones are removed."""
    count = 0
    for path in paths.clients.glob("*.json"):
        found = read_json(path)
        if found and found["host"] == socket.gethostname() and not process_alive(found["pid"], found["started"]):
            path.unlink(missing_ok=True)
        else:
            count += 1
    return count


def ask(paths: LabPaths, verb: str, **arguments: Any) -> None:
    """Leave a request for the keeper: launch, engines, bring or close (`grow`, `end_lab` wait for what comes of it)."""
    name = f"{time.time_ns():020d}-{os.getpid()}-{secrets.token_hex(2)}"
    with contextlib.suppress(FileNotFoundError):  # the lab has ended: whoever asks finds out by its state
        write_private(paths.control / f"{name}.json", {"verb": verb, "time": time.time(), **arguments})


def bring(run: dict[str, Any], run_dir: Path, n: int, command: Command) -> bool:
    """Have the lab of a run (its `run.json`) give it a command as soon as it has n engines; False where none lives."""
    paths = LabPaths(Path((run.get("lab") or {}).get("root", "")))
    if not alive(paths):
        return False
    ask(paths, "bring", run_dir=str(run_dir), n=n, command=vars(command))
    return True


def take_requests(paths: LabPaths) -> list[dict[str, Any]]:
    """The requests that wait, oldest first; they are removed."""
    taken = []
    for path in sorted(paths.control.glob("*.json")):
        request = read_json(path)
        path.unlink(missing_ok=True)
        if isinstance(request, dict) and "verb" in request:
            taken.append(request)
    return taken


def alive(paths: LabPaths) -> bool:
    """Whether a lab's keeper lives, or is about to write down that it does."""
    state = read_json(paths.state)
    if state is None:
        config = read_json(paths.config)
        return config is not None and time.time() - config["created"] < BIRTH
    keeper = state["keeper"]
    if keeper["host"] != socket.gethostname():
        return True  # a shared home: only its own host can tell
    return process_alive(keeper["pid"], keeper["started"])


def read_info(paths: LabPaths) -> dict[str, Any]:
    """What a lab's keeper last wrote, {} before it wrote anything; of the runs it has had, those that are still its."""
    info = read_json(paths.state) or {}
    return info | {"runs": [run for run in info["runs"] if owns(paths, run)]} if "runs" in info else info


def owns(paths: LabPaths, run_dir: str | Path) -> bool:
    """Whether a run is this lab's: not deleted, nor started again by another lab or torchrun (its `run.json` says)."""
    run = read_json(RunPaths(Path(run_dir)).run)
    lab = run.get("lab") if isinstance(run, dict) else None
    return isinstance(lab, dict) and lab.get("root") == str(paths.root)


def status(paths: LabPaths, config: dict[str, Any]) -> dict[str, Any]:
    """{"id", "state": queued | starting | ready | failed | ended, "engines", "ready", "job", "reason"} of a lab."""
    info = read_json(paths.state) or {}
    found = {"id": paths.root.name, "state": "starting", "engines": config.get("engines", 0), "ready": 0}
    found |= {"job": "", "reason": ""}
    if not alive(paths):
        return found | {"state": "ended", "engines": 0, "reason": last_words(paths)}
    return {key: info.get(key, value) for key, value in found.items()}


def status_text(status: dict[str, Any]) -> str:
    """A lab's `status` in a line."""
    job = f", job {status['job']}" if status["job"] else ""
    reason = f": {status['reason']}" if status["reason"] else ""
    return f"{status['id']}: {status['state']}, {status['ready']} of {status['engines']} engines{job}{reason}"


def last_words(paths: LabPaths) -> str:
    """The end of the log of a keeper that died; empty when the lab ended as it should, and removed its folder."""
    try:
        return paths.log.read_text(errors="replace").strip()[-500:]
    except OSError:
        return ""


def live_labs() -> list[LabPaths]:
    """Labs that live, oldest first."""
    folders = [LabPaths(path.parent) for path in registry().glob("*/config.json")]
    found = [(read_json(paths.config) or {}, paths) for paths in folders if alive(paths)]
    return [paths for _, paths in sorted(found, key=lambda pair: pair[0].get("created", 0.0))]


def dead_labs() -> list[LabPaths]:
    """Labs of this host whose keeper died before it could end them."""
    folders = [LabPaths(path.parent) for path in registry().glob("*/config.json")]
    return [paths for paths in folders if not alive(paths) and paths.config.is_file()]


def clean_leftovers() -> list[str]:
    """End what labs of this host left behind whose keeper died, and remove their folders; the ids of those labs."""
    found = dead_labs()
    for paths in found:
        remove_remains(paths)
    return [paths.root.name for paths in found]


def grow(paths: LabPaths, engines: int) -> None:
    """Have a lab start engines until it has that many; returns once its keeper has taken note. LabError for fewer than
    it has, where no keeper answers within NOTED, and when the lab has ended."""
    if not isinstance(engines, int) or isinstance(engines, bool) or engines < 1:
        raise LabError(f"a lab grows to a whole number of engines, not {engines!r}")
    has = status(paths, read_json(paths.config) or {})["engines"]
    ended = f"lab {paths.root.name} has ended; start another with mmlab.Lab()"
    if not alive(paths):
        raise LabError(ended)
    if engines < has:
        name = paths.root.name
        raise LabError(f"lab {name} has {has} engines, and a lab only grows: close it and start a smaller one")
    ask(paths, "engines", n=engines)
    end = time.monotonic() + NOTED
    while (read_json(paths.state) or {}).get("engines", 0) < engines:
        if not alive(paths):
            raise LabError(ended)
        if time.monotonic() > end:
            raise LabError(
                f"the keeper of lab {paths.root.name} has not answered within {NOTED:g} s; once it does, the lab grows"
            )
        time.sleep(0.05)


def end_lab(paths: LabPaths, info: dict[str, Any], timeout: float) -> str:
    """End a lab and everything that it has started; `info` is its `read_info`.

    "closed" when the keeper did it; "forced" when that did not within `timeout` seconds, or is stopped; "remains" when
    it had died.
    """
    dead = not alive(paths)
    ask(paths, "close")
    limit = time.monotonic() + timeout
    while alive(paths) and time.monotonic() < limit and not _stopped(info.get("keeper")):
        time.sleep(0.05)
    how = "remains" if dead else "forced" if alive(paths) else "closed"
    force_end(paths, info)
    if how == "forced":
        for folder in info.get("runs", []):
            if owns(paths, folder):
                _mark_stopped(Path(folder))
    return how


def _stopped(keeper: dict[str, Any] | None) -> bool:
    """Whether a keeper of this host was stopped by a signal: it does nothing until somebody continues it."""
    if keeper is None or keeper["host"] != socket.gethostname():
        return False
    with contextlib.suppress(psutil.Error):
        return bool(psutil.Process(keeper["pid"]).status() == psutil.STATUS_STOPPED)
    return False


def _mark_stopped(folder: Path) -> None:
    """Write that a run has ended with its lab, where nobody else has: its keeper did not live to do so."""
    with contextlib.suppress(OSError):
        path = RunPaths(folder).events
        events = last_events(path)
        if last_of(events, "state").get("state") in ENDED:
            return
        last = next((event for event in reversed(events) if "step" in event and event.get("lineage")), {})
        log = EventLog(path, last.get("lineage", ""))
        reason = "the lab was closed; its keeper did not answer"
        log.emit("state", state="stopped", step=last.get("step", 0), reason=reason)
        log.close()


def remove_remains(paths: LabPaths) -> None:
    """End every process of a lab whose keeper is gone, cancel its batch jobs and remove its files."""
    state = read_json(paths.state) or {}
    records = [Tracked(**record) for record in state.get("processes", [])]
    for command in state.get("cancel", []):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(command, timeout=30, check=False, capture_output=True)
    end_all(records, paths.root.name)
    remove_files(state.get("profile_dir"), state.get("cluster_id"))
    shutil.rmtree(paths.root, ignore_errors=True)


def force_end(paths: LabPaths, info: dict[str, Any]) -> None:
    """End a lab whose keeper did not do it itself: `info` is what it last wrote. Does nothing when it is gone."""
    if not paths.root.is_dir() and not info:
        return
    keeper = info.get("keeper")
    records = [Tracked(**record) for record in info.get("processes", [])]
    if keeper and keeper["host"] == socket.gethostname():
        records.append(Tracked(keeper["pid"], keeper["started"], "keeper"))
    if any(record.alive for record in records):
        end_all(records, paths.root.name)
    if paths.root.is_dir():
        remove_remains(paths)


def remove_files(profile_dir: str | None, cluster_id: str | None) -> None:
    """Remove the connection files and engine logs that a cluster left in its profile."""
    if not profile_dir or not cluster_id:
        return
    for path in itertools.chain(
        *(Path(profile_dir, folder).glob(f"*{cluster_id}*") for folder in ("security", "log", "pid"))
    ):
        with contextlib.suppress(OSError):
            path.unlink()
