"""The checkpoint browser: a tree of what was saved, and what a person does with it."""

from __future__ import annotations

import contextvars
import threading
import time
from html import escape
from typing import Any

from mmlab.errors import MmlabError
from mmlab.plan.typed import changes_of
from mmlab.tracking.checkpoints import layout_text
from mmlab.tracking.sent import Sent
from mmlab.tracking.tables import size
from mmlab.tracking.tree import CheckpointTree, lineage_text, saved_text
from mmlab.ui.panel import RunPanel
from mmlab.ui.source import RunSource
from mmlab.ui.words import event_text

AGAIN = 2.0
"""Seconds between looks at where checkpoints lie."""
SHARE = 10
"""Times that a look took until the next one: listing what lies far away takes a tenth of a thread at most."""
MOST = 400
"""Rows that a page gets; older ones are left out."""
WAIT = 2.0
"""Seconds that text and still pictures wait for a first look."""
ANSWERS = 8
"""Last answers to commands that pages get."""


class Listing:
    """A run's tree of checkpoints, looked at in a thread of its own: a location may be slow or out of reach."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.tree = CheckpointTree([])
        self.problem = ""
        self.looked = threading.Event()
        """Set once there has been a look."""
        self._lock = threading.Lock()
        self._under_way = False
        self._stale = True
        self._next = 0.0

    def renew(self) -> None:
        """Something has changed: look again as soon as the look under way has ended."""
        self._stale = True

    def glance(self) -> None:
        """See to it that what is known is fresh enough; returns at once."""
        with self._lock:
            if self._under_way or not (self._stale or time.monotonic() >= self._next):
                return
            self._under_way, self._stale = True, False
        work = contextvars.copy_context().run
        threading.Thread(target=work, args=(self._look,), name="mmlab checkpoints", daemon=True).start()

    def _look(self) -> None:
        began = time.monotonic()
        try:
            self.tree, self.problem = CheckpointTree.of(self.run), ""
        except MmlabError as error:
            self.problem = str(error)
        except Exception as error:  # a location may answer with anything; the page says it, and the thread ends well
            self.problem = f"{type(error).__name__}: {error}"
        finally:
            now = time.monotonic()
            with self._lock:
                self._next, self._under_way = now + max(AGAIN, SHARE * (now - began)), False
            self.looked.set()


class Checkpoints(RunPanel):
    """What was saved, branch by branch; comparing two, going back to one, branching off, naming, deleting."""

    name = "checkpoints"
    title = "Checkpoints"
    spoken = (
        "unreadable",
        "nodes.*.text",
        "answers.*.2",
        "went_back",
        "text",
        "restore.text",
        "branch.text",
        "saved",
        "why",
    )
    every = 0.5
    slow = frozenset({"details", "compare", "check", "restore", "branch", "rename", "delete"})
    lasting = True

    def __init__(self, source: RunSource) -> None:
        super().__init__(source)
        self._listing = Listing(source.run)
        self._seen: Any = None
        self._rows: tuple[Any, list[dict[str, Any]]] = (None, [])

    def frame(self) -> dict[str, Any]:
        """The rows of the tree (the newest MOST), why it cannot be read, state, and the last answers to commands."""
        newest = next((e["t"] for e in reversed(self.feed.recent) if e["kind"] in ("checkpoint", "lineage")), None)
        if newest != self._seen:
            self._seen = newest
            self._listing.renew()
        self._listing.glance()
        nodes = self._listing.tree.nodes
        commands = list(self.feed.commands)[-ANSWERS:]
        return {
            "run": self.feed.paths.root.name,
            "state": self.feed.state,
            "listed": self._listing.looked.is_set(),
            "unreadable": self._listing.problem,
            "nodes": self._slimmed(),
            "left_out": max(0, len(nodes) - MOST),
            "answers": [[e.get("id"), bool(e.get("ok")), event_text(e)] for e in commands],
            "went_back": next((event_text(e) for e in reversed(self.feed.recent) if e["kind"] == "restore"), ""),
        }

    def _slimmed(self) -> list[dict[str, Any]]:
        """The rows, made once for each look."""
        if self._rows[0] is not self._listing.tree:
            tree = self._listing.tree
            self._rows = tree, [_slim(node) for node in tree.nodes[-MOST:]]
        return self._rows[1]

    def handle(self, verb: str, args: dict[str, Any]) -> Any:
        """What a button asks: the outcome in words, or of details and comparisons all there is to show."""
        run = self.source.run
        name = str(args.get("name", ""))
        if verb == "details":
            return self._details(name)
        if verb == "compare":
            return run.compare(str(args["first"]), str(args["second"])).to_json()
        if verb == "check":
            return self._check(name, str(args.get("changes", "")))
        try:
            return self._act(verb, name, args)
        finally:
            self._listing.renew()

    def _act(self, verb: str, name: str, args: dict[str, Any]) -> dict[str, Any]:
        run, changes = self.source.run, changes_of(str(args.get("changes", "")))
        if verb == "restore":
            done = run.restore(name=name, plan=changes or None)
            if isinstance(done, Sent):
                return {"text": f"restore {name}: sent, waits for the end of the step under way", "id": done.id}
            return {"text": f"the run starts again from {name}"}
        if verb == "branch":
            new = run.branch(*changes, name=name)
            waits = new.status()["reason"]
            return {"text": f"run {new.id} {waits}, then starts from {name}" if waits.startswith("waits for the end")
                    else f"run {new.id} starts from {name}"}  # fmt: skip
        if verb == "rename":
            row = run.rename_checkpoint(name, str(args.get("new", "")))
            return {"text": f"{name} is now {row['name']}, and kept", "name": row["name"]}
        if verb == "delete":
            row = run.delete_checkpoint(name, bool(args.get("force")))
            return {"text": f"deleted {name} of step {row['step']}, {size(row['bytes'])}"}
        raise ValueError(f"unknown request {verb!r}")

    def _check(self, name: str, typed: str) -> dict[str, Any]:
        """What a restore and a branch with these changes would go on by, or why they cannot."""
        run, found = self.source.run, {}
        for what, plan in (
            ("restore", lambda: run.restored_plan(*changes) if (changes := changes_of(typed)) else run.plan),
            ("branch", lambda: run.branched_plan(*changes_of(typed), name=name)),
        ):
            try:
                made = plan()
                found[what] = {"ok": True, "text": f"{layout_text(made)}; {made.train.steps} steps in all"}
            except MmlabError as error:
                found[what] = {"ok": False, "text": str(error)}
        return found

    def _details(self, name: str) -> dict[str, Any]:
        info = self.source.run.checkpoint_info(name)
        plan, now = info.pop("plan"), self.source.run.plan
        differs = [[c.key, str(c.before), str(c.after)] for c in now.diff(plan)] if plan is not None else []
        epochs = [source["epoch"] for source in (info.pop("position") or {}).get("sources", [])]
        return {**info, "epochs": epochs, "differs": differs, "saved": saved_text(info), "has_plan": plan is not None}

    def _looked(self) -> Listing:
        self._listing.glance()
        self._listing.looked.wait(WAIT)
        return self._listing

    def text(self) -> str:
        """The tree as a table."""
        known = self._looked()
        return known.problem or (str(known.tree) if known.looked.is_set() else "checkpoints are being looked for")

    def html(self) -> str:
        """The tree as a table."""
        known = self._looked()
        return f"<p>{escape(known.problem)}</p>" if known.problem else known.tree.html()


def _slim(node: dict[str, Any]) -> dict[str, Any]:
    """What a page needs of a node of the tree."""
    if node["kind"] == "lineage":
        return {"kind": "lineage", "depth": node["depth"], "text": lineage_text(node), "here": node["last"]}
    if node["kind"] == "run":
        return {"kind": "run", "depth": node["depth"], "text": node["run"]}
    keys = (
        "kind",
        "depth",
        "name",
        "step",
        "loss",
        "layout",
        "samples",
        "bytes",
        "shared_bytes",
        "periodic",
        "current",
    )
    return {key: node[key] for key in keys} | {
        "when": time.strftime("%m-%d %H:%M:%S", time.localtime(node["time"] or 0))
    }
