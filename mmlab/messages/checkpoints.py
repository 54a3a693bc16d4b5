"""What a folder of checkpoints holds: each a folder that is complete when its manifest, written last, is there.

A manifest is JSON: format, name, step, time, seconds, bytes, files {name: {size, sha256}}, frozen {module: {folder,
content, bytes}} (what is stored once, below `.frozen/`, for all checkpoints that refer to it), step, lineage, cursors,
plan, ... and `seal`, a checksum of all the rest; `given`, the name that it was given later.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from mmlab.errors import CheckpointError
from mmlab.messages.events import Event, last_steps
from mmlab.messages.files import RunPaths
from mmlab.messages.locations import Location

MANIFEST = "manifest.json"
FROZEN = ".frozen"
"""Folder beside the checkpoints with what is frozen. No checkpoint can be called so."""
LONGEST_NAME = 200
"""Bytes of a checkpoint's name: file systems admit 255, and one that takes the place of another has a longer one."""

Found = tuple[Location, dict[str, Any]]
"""A checkpoint's folder and manifest."""


def location_of(paths: RunPaths, location: str) -> Location:
    """Where a run keeps its checkpoints: its own folder of them, or one of its name at `checkpoint.location`."""
    return Location(location) / paths.root.name if location else Location(paths.checkpoints)


def kept_at(paths: RunPaths) -> Location:
    """Where a run keeps its checkpoints by what its `plan.toml` says; its own folder where that cannot be read."""
    location = ""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        location = str(tomllib.loads(paths.plan.read_text()).get("checkpoint", {}).get("location", ""))
    return location_of(paths, location)


def seal(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of a manifest without its `seal`."""
    rest = {key: value for key, value in manifest.items() if key != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def read_manifest(folder: Location) -> Any:
    """What a folder's manifest says; None where there is none, or nothing that is JSON."""
    try:
        return json.loads(folder.read(MANIFEST))
    except (OSError, ValueError, RecursionError):  # the last: nested without end
        return None


def manifests(checkpoints: Location, keys: Sequence[str] = ("name", "step", "time")) -> list[Found]:
    """Complete checkpoints with their manifests, those with these keys at least; damaged manifests are passed over.

    OSError when the location cannot be reached.
    """
    folders = [folder for folder in checkpoints.folders() if not folder.name.startswith(".")]  # nor copies under way
    found = [(folder, read_manifest(folder)) for folder in folders]
    return [(folder, m) for folder, m in found if isinstance(m, dict) and m.keys() >= set(keys)]


def check_name(name: str) -> None:
    """CheckpointError for a name that cannot be a folder's."""
    if name and (name != name.strip(". ") or not name.isprintable() or any(c in name for c in "/\\")):
        raise CheckpointError(
            f"{name!r} is not a name for a checkpoint: no / and \\, no control characters, no blank or dot at an end"
        )
    if len(name.encode()) > LONGEST_NAME:
        raise CheckpointError(f"a checkpoint's name has at most {LONGEST_NAME} bytes, not {len(name.encode())}")


def flaw(folder: Location, manifest: Any) -> str:
    """What shows, without reading its files, that a checkpoint or a frozen part is not what was written; "" when
    nothing does."""
    if not isinstance(manifest, dict) or "files" not in manifest:
        return f"{folder} holds no complete checkpoint (no {MANIFEST} that can be read)."
    if "seal" in manifest and seal(manifest) != manifest["seal"]:
        return f"checkpoint {folder.name} is damaged: {MANIFEST} is not what was written."
    try:
        sizes = folder.sizes()
    except OSError as error:
        return f"checkpoint {folder.name} cannot be read: {error}"
    for name, wanted in manifest["files"].items():
        size = sizes.get(name, -1)
        if size != wanted["size"]:
            found = "is missing" if size < 0 else f"has {size} bytes, not {wanted['size']}"
            return f"checkpoint {folder.name} is damaged: {name} {found}. Restore another one."
    return ""


def called(folder: Location, manifest: Mapping[str, Any]) -> str:
    """A checkpoint's name: the one it was given later, else its folder's, without the number of one that has taken the
    place of another (`name~2`)."""
    if manifest.get("given"):
        return str(manifest["given"])
    name = str(manifest.get("name", folder.name))
    return name if re.fullmatch(re.escape(name) + r"(~\d+)?", folder.name) else folder.name


def chain(events: Sequence[Event]) -> list[Event]:
    """The current lineage and its ancestors, newest first, as lineage events (id, parent, parent_step)."""
    known = {event["id"]: event for event in events if event["kind"] == "lineage"}
    last = next(reversed(known.values()), None) if known else None
    found: list[Event] = []
    while last is not None and last not in found:
        found.append(last)
        last = known.get(last["parent"])
    return found


def inherited(lineages: Sequence[Event]) -> dict[str, float]:
    """`last_steps` of a run's lineages (newest first), and that of another run that the first one branches off."""
    limit = last_steps(list(lineages))
    if lineages and (origin := lineages[-1]["parent"]):
        limit.setdefault(origin, lineages[-1]["parent_step"])
    return limit


def newest_first(found: Sequence[Found], events: Sequence[Event]) -> list[Found]:
    """Checkpoints in the order in which a run would go on from them: those of the current lineage and of what it
    inherits from its ancestors, then what restores have taken back; in each the newest first."""
    limit = inherited(chain(events))

    def age(pair: Found) -> tuple[bool, float]:
        manifest = pair[1]
        return manifest["step"] > limit.get(manifest.get("lineage", ""), -1), -manifest["time"]

    return sorted(found, key=age)
