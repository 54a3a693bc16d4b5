"""Which checkpoints there are: found by name or step, held against their manifests, kept or removed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mmlab.errors import CheckpointError, DamagedError
from mmlab.messages import Event
from mmlab.messages.checkpoints import FROZEN, MANIFEST, Found, called, flaw, manifests, newest_first
from mmlab.messages.checkpoints import read_manifest as read
from mmlab.messages.locations import Location
from mmlab.train.checkpoint.writing import FORMAT

KEYS = ("step", "time", "lineage", "files")
_OURS = re.compile(r"__\d+_\d+\.distcp|\.metadata(\.tmp)?|manifest\.json\.partial|\.manifest\.json\..*\.tmp")
"""Files that a save leaves when it is cut short; a folder with anything else in it is somebody's own."""


def known(checkpoints: Location) -> list[Found]:
    """Complete checkpoints. CheckpointError when the location cannot be reached."""
    try:
        return manifests(checkpoints, KEYS)
    except OSError as error:
        raise CheckpointError(f"checkpoints cannot be read: {error}") from None


def candidates(
    checkpoints: Location, step: int | None = None, name: str = "", lineage: str = "", events: Sequence[Event] = ()
) -> list[Location]:
    """Checkpoints with a name, else of a step (of a lineage if it has one), else all, in the order in which a run would
    go on from them.

    CheckpointError lists what there is when nothing fits.
    """
    found = known(checkpoints)
    of_step = [(p, m) for p, m in found if step in (None, m["step"])]
    fits = [(p, m) for p, m in of_step if not name or name == called(p, m)]
    fits = fits or [(p, m) for p, m in of_step if name == p.name]  # a folder keeps its name when another is given
    if step is not None or name:
        fits = [(p, m) for p, m in fits if m["lineage"] == lineage] or fits
        fits.sort(key=lambda pair: -pair[1]["time"])
    if not fits:
        wanted = f"named {name}" if name else f"of step {step}" if step is not None else "at all"
        there = sorted(found, key=lambda pair: pair[1]["time"])
        have = ", ".join(f"{called(p, m)} (step {m['step']})" for p, m in there) or "none"
        raise CheckpointError(f"there is no checkpoint {wanted}; there are: {have}.")
    return [folder for folder, _ in (fits if step is not None or name else newest_first(fits, events))]


def find(checkpoints: Location | Path, step: int | None = None, name: str = "", lineage: str = "") -> Location:
    """The checkpoint with a name, else the newest of a step (of a lineage if it has one), else the newest.

    CheckpointError lists what there is when nothing fits.
    """
    return candidates(_location(checkpoints), step, name, lineage)[0]


def _location(folder: Location | Path) -> Location:
    return folder if isinstance(folder, Location) else Location(folder)


def read_manifest(folder: Location | Path) -> dict[str, Any]:
    """The manifest of a checkpoint, or of what is frozen.

    CheckpointError when there is none, DamagedError when it is not what was written or a file is missing or of another
    size.
    """
    folder = _location(folder)
    manifest = read(folder)
    if isinstance(manifest, dict) and manifest.get("format", 1) > FORMAT:
        raise CheckpointError(f"checkpoint {folder.name} was written by a newer mmlab; load it with that one.")
    if wrong := flaw(folder, manifest):
        raise DamagedError(wrong)
    assert isinstance(manifest, dict)
    return manifest


def parts(folder: Location, manifest: Mapping[str, Any]) -> list[tuple[Location, dict[str, Any]]]:
    """A checkpoint's folder and those of the frozen modules that it refers to, with their manifests. Errors as those of
    `read_manifest`; DamagedError also where a frozen part is not the one that was referred to."""
    above = Location(folder.address.rpartition("/")[0])
    found = [(folder, dict(manifest))]
    for module, part in manifest.get("frozen", {}).items():
        place = above / FROZEN / part["folder"]
        try:
            own = read_manifest(place)
        except DamagedError as error:
            raise DamagedError(f"checkpoint {folder.name} refers to the frozen {module}: {error}") from None
        if own.get("content") != part["content"]:
            raise DamagedError(f"checkpoint {folder.name} refers to a frozen {module} that is not in {place}.")
        found.append((place, own))
    return found


def damage(folder: Location, manifest: Mapping[str, Any], names: Sequence[str]) -> str:
    """Which of these files is not what was saved; "" when all are."""
    for name in names:
        try:
            if folder.checksum(name) != manifest["files"][name]["sha256"]:
                return f"checkpoint {folder.name} is damaged: {name} is not what was saved. Restore another one."
        except OSError as error:
            return f"checkpoint {folder.name}: {name} cannot be read: {error}"
    return ""


class Retention:
    """What is kept of a run's checkpoints (rank 0). Each is held against its checksums once at most."""

    def __init__(self, checkpoints: Location) -> None:
        self.checkpoints = checkpoints
        self._judged: dict[tuple[str, float], bool] = {}

    def good(self, found: Found) -> bool:
        """Whether a checkpoint is what was saved: elsewhere than on this machine's disks by the sizes of its files
        alone, as reading it back would cost a download."""
        folder, manifest = found
        key = folder.address, manifest["time"]
        if key not in self._judged:
            try:
                places = parts(folder, read_manifest(folder))
                read_back = places if folder.local is not None else []
                self._judged[key] = not any(damage(place, m, sorted(m["files"])) for place, m in read_back)
            except CheckpointError:
                self._judged[key] = False
        return self._judged[key]

    def prune(self, keep_last: int, keep_every: int) -> list[str]:
        """Remove what a newer one of its name has replaced, periodic checkpoints beyond the newest `keep_last` (0 keeps
        all) but for those of every `keep_every`-th step (0: none), and frozen parts that no checkpoint refers to.

        Those made on command are kept, and so is the newest that is what was saved. Returns the names removed.
        """
        found = sorted(known(self.checkpoints), key=lambda pair: pair[1]["time"])
        newer = {m["replaces"]: m["time"] for _, m in found if "replaces" in m}
        old = [(p, m) for p, m in found if newer.get(p.name, 0.0) > m["time"]]
        rest = [pair for pair in found if pair not in old and pair[1].get("periodic")]
        if keep_last:
            old += [p for p in rest[:-keep_last] if not (keep_every and p[1]["step"] % keep_every == 0)]
        if old:
            newest = next((pair for pair in reversed(found) if self.good(pair)), None)
            old = [pair for pair in old if newest is not None and pair is not newest]
        kept = [pair for pair in found if pair not in old]
        for folder, manifest in list(old):
            if read(folder) != manifest:  # somebody has given it a name since it was looked at, or removed it
                old.remove((folder, manifest))
                kept.append((folder, manifest))
                continue
            with contextlib.suppress(OSError):  # what cannot be removed is no reason to end a run
                folder.remove(first=MANIFEST)
        used = {part["folder"] for _, m in kept for part in m.get("frozen", {}).values()}
        frozen = [place for place in (self.checkpoints / FROZEN).folders() if place.name not in used]
        for place in frozen if kept else []:
            with contextlib.suppress(OSError):
                place.remove(first=MANIFEST)
        return [folder.name for folder, _ in old]

    def clean(self) -> list[str]:
        """Remove what interrupted saves and removals have left; returns its names. Not while a save is under way."""
        places = [*self.checkpoints.folders(), *(self.checkpoints / FROZEN).folders()]
        removed = []
        for folder in places:
            files = folder.sizes()
            whole = MANIFEST in files and not folder.name.startswith(".")  # a copy under way has such a name
            if folder.name == FROZEN or whole or folder.folders():
                continue
            if all(_OURS.fullmatch(name) or name == MANIFEST for name in files):
                folder.remove()
                removed.append(folder.name)
        return removed
