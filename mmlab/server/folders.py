"""Which run folders a server may show: those below its root, wherever links in them lead."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
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
        self._created: dict[Path, tuple[tuple[int, int], float]] = {}

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

    def newest(self, more: Collection[str] = ()) -> list[tuple[str, RunPaths]]:
        """Keys and paths of the newest runs in `runs` and `*/runs` below the root, in MMLAB_RUNS where that is below
        it, and beside the runs of labs that were seen; newest first. Runs with keys in `more` are there however old.

        With 300 runs below the root, checking all of their paths for links took 370 ms a look; of the newest, 20.
        """
        found: dict[str, tuple[float, RunPaths]] = {}
        for created, folder in self._by_age():
            with contextlib.suppress(MmlabError, OSError):
                if len(found) < NEWEST and (key := self.key(folder)) is not None and key not in found:
                    found[key] = created, self._checked(folder, key)
        for key in more:
            with contextlib.suppress(MmlabError, OSError):
                paths = self.find(key)
                if key not in found and (at := self._created_at(paths.run)) is not None:
                    found[key] = at, paths
        ordered = sorted(found.items(), key=lambda item: -item[1][0])
        return [(key, paths) for key, (_, paths) in ordered]

    def _by_age(self) -> list[tuple[float, Path]]:
        """When each run folder in the known places was made, newest first; not checked for links."""
        files = {path for pattern in PLACES for path in self.root.glob(pattern)}
        for place in {*self._seen, runs_root()}:
            files |= set(place.glob("*/run.json"))
        self._created = {path: known for path, known in self._created.items() if path in files}
        made = ((self._created_at(path), path.parent) for path in files)
        return sorted(((at, folder) for at, folder in made if at is not None), reverse=True)

    def _created_at(self, run: Path) -> float | None:
        """When a run was made, as its `run.json` says; read again only where that was written anew. None: no run's."""
        try:
            now = os.stat(run)
            state = (now.st_mtime_ns, now.st_ino)
            known = self._created.get(run)
            if known is None or known[0] != state:
                known = self._created[run] = state, float((read_json(run) or {}).get("created", 0.0))
            return known[1]
        except (OSError, ValueError, TypeError, AttributeError):
            return None

    def _checked(self, folder: Path, key: str) -> RunPaths:
        paths = RunPaths(Path(os.path.realpath(folder)))
        inside = paths.root != self.root and self.root in paths.root.parents
        if not inside or not paths.run.is_file():
            raise OutsideError(f"{key!r} does not name a run below {self.root}")
        for path in (paths.run, paths.plan, paths.events, paths.control, paths.acks, paths.ranks, paths.failures):
            if path.is_symlink() and paths.root not in Path(os.path.realpath(path)).parents:
                raise OutsideError(f"{key!r}: {path.name} leads out of the run's folder")
        return paths
