"""What the routes do, without the web: look at labs and runs, leave commands. Everything here may wait for a disk."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mmlab.cluster import registry
from mmlab.cluster.registry import CLOSE, LabPaths
from mmlab.errors import LabError, MmlabError
from mmlab.lessons import place_notebooks
from mmlab.messages import ENDED, Event, read_ack
from mmlab.messages.events import last_events, last_of, last_state, planned_steps
from mmlab.messages.files import RunPaths, read_json
from mmlab.server.folders import RunFolders
from mmlab.tracking.sent import Sent
from mmlab.tracking.steered import Steered
from mmlab.ui.feed import Feed

POINTS = 200
"""Points of a curve."""
FRESH = 0.5
"""Seconds for which an overview is good for other pages too."""
SLICE = 0.1
"""Seconds for which a look reads a log; the rest of a long one (2 s for 100,000 steps) waits for the next looks."""
FEEDS = 8
"""Runs whose logs are followed; the one asked for longest ago is forgotten first."""
MOST_ENGINES = 64
"""Engines that a page may ask for; a plan that is trained brings more."""
LEFTOVER = "its keeper died; closing it ends what is left of it"
"""Said of a lab without a keeper."""
COMMAND_ID = re.compile(r"\d{20}-\d+-\d+")


class Followed(Steered):
    """A run whose event log is read a piece at a time, and that is steered through the verbs of every other face."""

    def __init__(self, run_dir: Path) -> None:
        self.feed = Feed(run_dir, capacity=POINTS)
        self._record = self.feed.record
        self.created = self._record.info.get("created")
        self.lock = threading.Lock()
        self.asked = time.monotonic()

    def status(self) -> dict[str, Any]:
        """The state now, read from what is new."""
        with self.lock:
            self.feed.read(seconds=SLICE)
            self.feed.look()
            return {"state": self.feed.state, "reason": self.feed.reason}

    def brief(self) -> dict[str, Any]:
        """State, reason, step, steps, loss."""
        status = self.status()
        feed = self.feed
        if feed.reading is not None:  # its curves are behind
            return at_end(feed.paths, last_events(feed.paths.events)) | status
        return status | {"step": feed.step, "steps": feed.steps, "loss": feed.last.get("loss")}

    def details(self) -> dict[str, Any]:
        """`brief` with ranks and the loss curve [[step, loss], ...]."""
        brief = self.brief()
        with self.lock:
            x, y = self.feed.curves["loss"].points()
            return brief | {
                "doing": self.feed.doing,
                "ranks": self.feed.ranks,
                "curve": [[int(step), loss] for step, loss in zip(x, y, strict=True)],
            }


def at_end(paths: RunPaths, events: list[Event]) -> dict[str, Any]:
    """What the events at the end of a run's log say: state, reason, step, steps, loss."""
    state, step = last_of(events, "state"), last_of(events, "step")
    brief = {"state": state.get("state", ""), "reason": state.get("reason") or ""}
    brief |= {"step": step.get("step", state.get("step", 0)), "loss": step.get("loss")}
    return brief | {"steps": planned_steps(events, int((read_json(paths.run) or {}).get("steps", 0)))}


class Desk:
    """Labs of this user and runs below a root, for the handlers. Safe from several threads."""

    def __init__(self, root: Path | str) -> None:
        self.folders = RunFolders(root)
        self._lock = threading.Lock()
        self._following = threading.Lock()
        """Held while the dictionary of what is followed changes, not while a disk is read."""
        self._followed: dict[Path, Followed] = {}
        self._over: dict[Path, tuple[int, dict[str, Any]]] = {}
        self._overview: tuple[float, dict[str, Any]] | None = None

    # looking

    def overview(self) -> dict[str, Any]:
        """{"labs": [...], "runs": [...], "problem": of the root or ""}, newest run first; the same for all who ask
        within FRESH seconds."""
        with self._lock:
            if self._overview is None or time.monotonic() - self._overview[0] > FRESH:
                labs = self._labs()
                newest = self.folders.newest([key for lab in labs for key in lab["runs"]])
                runs = [self._listed(key, paths) for key, paths in newest]
                root = self.folders.root
                problem = "" if root.is_dir() else f"the folder of this server is gone: {root}"
                self._overview = (time.monotonic(), {"labs": labs, "runs": runs, "problem": problem})
            return self._overview[1]

    def run(self, key: str, command: str = "") -> dict[str, Any]:
        """One run with its ranks and curve; "ack" of a command of it where one is named (None: not yet)."""
        paths = self.folders.find(key)
        found = self._name(key, paths) | self._follow(paths).details()
        if command:
            if not COMMAND_ID.fullmatch(command):
                raise MmlabError(f"{command!r} is not a command's id")
            ack = read_ack(paths.control, command)
            found["ack"] = asdict(ack) if ack else None
        return found

    def _labs(self) -> list[dict[str, Any]]:
        """Live labs, and those whose keeper died ("ended"): as `Lab.status()`, with "runs" (keys, oldest first) and
        "outside" (how many of its runs are not below the root)."""
        found = []
        for paths in registry.live_labs():
            keys = [self.folders.key(folder) for folder in registry.read_info(paths).get("runs", [])]
            inside = [key for key in keys if key is not None]
            status = registry.status(paths, read_json(paths.config) or {})
            found.append(status | {"runs": inside, "outside": len(keys) - len(inside)})
        for paths in registry.dead_labs():
            status = registry.status(paths, {}) | {"reason": LEFTOVER}
            found.append(status | {"runs": [], "outside": 0})
        return found

    def _name(self, key: str, paths: RunPaths) -> dict[str, Any]:
        info = read_json(paths.run) or {}
        lab = info.get("lab")
        lab = Path(str(lab.get("root", ""))).name if isinstance(lab, dict) else ""
        known = {"key": key, "id": paths.root.name, "created": info.get("created", 0.0), "lab": lab}
        return known | {"generation": info.get("generation", 0), "world_size": info.get("world_size", 0)}

    def _listed(self, key: str, paths: RunPaths) -> dict[str, Any]:
        """A run in a list. Of one that has ended only the end of the log is read; of one that has, or whose processes
        are gone, nothing again until the log grows."""
        try:
            size = paths.events.stat().st_size if paths.events.is_file() else 0
            known = self._over.get(paths.root)
            if known is None or known[0] != size:
                events = last_events(paths.events)
                over = last_of(events, "state").get("state") in ENDED
                brief = at_end(paths, events) if over else self._follow(paths).brief()
                if brief["state"] not in ENDED:
                    return self._name(key, paths) | brief
                known = self._over[paths.root] = (size, brief)
            return self._name(key, paths) | known[1]
        except Exception as error:  # a damaged folder, of whatever kind, is no reason to show no other run
            reason = str(error) if isinstance(error, MmlabError) else f"{type(error).__name__}: {error}"
            return self._name(key, paths) | {"state": "unreadable", "reason": reason, "step": 0, "steps": 0}

    def _follow(self, paths: RunPaths) -> Followed:
        found = self._followed.get(paths.root)
        if found is None or found.created != (read_json(paths.run) or {}).get("created"):  # else a new run of that name
            found = Followed(paths.root)
            self._over.pop(paths.root, None)
            with self._following:
                for root, _ in sorted(self._followed.items(), key=lambda item: item[1].asked)[: -FEEDS + 1]:
                    self._followed.pop(root, None)
                self._followed[paths.root] = found
        found.asked = time.monotonic()
        return found

    # steering

    def command(self, key: str, verb: str, args: dict[str, Any]) -> dict[str, Any]:
        """Leave a command in a run's inbox: {"verb", "id"}. MmlabError on what a run does not take."""
        run = self._follow(self.folders.find(key))
        if verb not in ("pause", "resume", "step", "checkpoint", "stop", "abort"):
            raise MmlabError(f"{verb!r} is not a verb of this route; use a notebook or `mmlab {verb}`")
        sent: Sent
        if verb == "step":
            n = args.get("n", 1)
            if not isinstance(n, int) or isinstance(n, bool):
                raise MmlabError(f"step takes a whole number of steps, not {n!r}")
            sent = run.step(n)
        elif verb == "checkpoint":
            name = args.get("name", "")
            if not isinstance(name, str):
                raise MmlabError("a checkpoint's name is a text")
            sent = run.checkpoint(name)
        else:
            sent = getattr(run, verb)()
        return {"verb": verb, "id": sent.id}

    def start_lab(self, engines: Any) -> dict[str, Any]:
        """Start a lab that outlives this server; its status. It ends itself when nobody uses it."""
        from mmlab.lab import Lab

        if not isinstance(engines, int) or isinstance(engines, bool) or not 1 <= engines <= MOST_ENGINES:
            raise LabError(f"a lab starts with 1 to {MOST_ENGINES} engines, not {engines!r}")
        lab = Lab(engines=engines, outlive=True)
        registry.detach_client(lab.id)
        self._forget_overview()
        return lab.status()

    def grow_lab(self, lab_id: str, engines: Any) -> dict[str, Any]:
        """Have a lab start more engines, that many in all; its status. LabError for what a lab cannot grow to."""
        if not isinstance(engines, int) or isinstance(engines, bool) or not 1 <= engines <= MOST_ENGINES:
            most = f"from a page {MOST_ENGINES} at most"
            raise LabError(f"a lab grows to a whole number of engines, {most}, not {engines!r}")
        paths = self._live(lab_id)
        registry.grow(paths, engines)
        self._forget_overview()
        return registry.status(paths, read_json(paths.config) or {})

    def close_lab(self, lab_id: str) -> dict[str, Any]:
        """End a lab with all its processes, also where its ranks, its controller or its keeper hang: {"id", "state",
        "how": as `registry.end_lab` says}. LabError for one that is not there, and for one with an unfinished run
        outside of the root."""
        (paths, *_) = [one for one in registry.dead_labs() if one.root.name == lab_id] or [self._live(lab_id)]
        info = registry.read_info(paths)
        for folder in info.get("runs", []):
            if self.folders.key(folder) is None and last_state(RunPaths(Path(folder)).events) not in ENDED:
                raise LabError(f"lab {lab_id} has a run outside of {self.folders.root}: `mmlab close {lab_id}` ends it")
        how = registry.end_lab(paths, info, CLOSE)
        self._forget_overview()
        return {"id": lab_id, "state": "ended", "how": how}

    def _live(self, lab_id: str) -> LabPaths:
        for paths in registry.live_labs():
            if paths.root.name == lab_id:
                return paths
        raise LabError(f"no lab {lab_id} lives: it has ended")

    def place_notebook(self, folder: Path) -> str:
        """Copy the notebooks that are not there into a folder; the name of the quickstart one."""
        return place_notebooks(folder).name

    def _forget_overview(self) -> None:
        self._overview = None  # without the lock, which a look at a slow disk may hold
