"""Which run folders a server may show: those below its root, wherever links in them lead."""

from __future__ import annotations

import os
from pathlib import Path

from mmlab.errors import MmlabError
from mmlab.messages.files import RunPaths, read_json
from mmlab.messages.runs import runs_root

NEWEST = 30
"""Runs in a list."""
PLACES = ("runs/*/run.json", "*/runs/*/run.json")
"""Where runs are looked for below the root: a kernel puts them into `runs` beside its notebook."""


class OutsideError(MmlabError):
    """A run folder that is not there, or not below the root."""


class RunFolders:
    """Run folders below one folder, each known by its path from there ("runs/20260131-120000-laptop")."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(os.path.realpath(root))
        self._seen: set[Path] = set()

    def find(self, key: str) -> RunPaths:
        """The run of a key. OutsideError for what is no run, for `..`, and for links that lead out of the root."""
        parts = key.split("/")
        if not key or "\\" in key or "\0" in key or any(part in ("", ".", "..") for part in parts):
            raise OutsideError(f"{key!r} does not name a run below {self.root}")
        return self._checked(self.root.joinpath(*parts), key)

    def key(self, folder: Path | str) -> str | None:
        """The key of a run's folder; None where it is not below the root. What lies beside it is listed from now on."""
        real = Path(os.path.realpath(folder))
        if real == self.root or self.root not in real.parents:
            return None
        self._seen.add(real.parent)
        return real.relative_to(self.root).as_posix()

    def newest(self) -> list[tuple[str, RunPaths]]:
        """Keys and paths of the newest runs in `runs` and `*/runs` below the root, in MMLAB_RUNS where that is below
        it, and beside the runs of labs that were seen; newest first."""
        known = {path.parent for pattern in PLACES for path in self.root.glob(pattern)}
        for place in {*self._seen, runs_root()}:
            known |= {path.parent for path in place.glob("*/run.json")}
        found: dict[str, tuple[float, RunPaths]] = {}
        for folder in known:
            if (key := self.key(folder)) is None or key in found:
                continue
            try:
                paths = self._checked(folder, key)
                found[key] = (float((read_json(paths.run) or {}).get("created", 0.0)), paths)
            except (MmlabError, OSError, ValueError, TypeError, AttributeError):
                continue
        ordered = sorted(found.items(), key=lambda item: -item[1][0])
        return [(key, paths) for key, (_, paths) in ordered[:NEWEST]]

    def _checked(self, folder: Path, key: str) -> RunPaths:
        paths = RunPaths(Path(os.path.realpath(folder)))
        inside = paths.root != self.root and self.root in paths.root.parents
        if not inside or not paths.run.is_file():
            raise OutsideError(f"{key!r} does not name a run below {self.root}")
        for path in (paths.run, paths.plan, paths.events, paths.control, paths.acks, paths.ranks, paths.failures):
            real = Path(os.path.realpath(path))
            if paths.root not in real.parents:
                raise OutsideError(f"{key!r}: {path.name} leads out of the run's folder")
        return paths
