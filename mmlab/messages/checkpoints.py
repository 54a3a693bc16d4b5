"""What a folder of checkpoints holds: each a folder that is complete when its manifest, written last, is there.

A manifest is JSON: format, name, step, time, seconds, bytes, files {name: {size, sha256}}, frozen {module: {folder,
content, bytes}} (what is stored once, below `.frozen/`, for all checkpoints that refer to it), step, lineage, cursors,
plan, ... and `seal`, a checksum of all the rest.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from mmlab.messages.events import Event, last_steps
from mmlab.messages.files import RunPaths
from mmlab.messages.locations import Location

MANIFEST = "manifest.json"
FROZEN = ".frozen"
"""Folder beside the checkpoints with what is frozen. No checkpoint can be called so."""

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


def called(folder: Location, manifest: Mapping[str, Any]) -> str:
    """A checkpoint's name: its folder's, without the number of one that has taken the place of another (`name~2`)."""
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


def newest_first(found: Sequence[Found], events: Sequence[Event]) -> list[Found]:
    """Checkpoints in the order in which a run would go on from them: those of the current lineage and of what it
    inherits from its ancestors, then what restores have taken back; in each the newest first."""
    limit = last_steps(chain(events))

    def age(pair: Found) -> tuple[bool, float]:
        manifest = pair[1]
        return manifest["step"] > limit.get(manifest.get("lineage", ""), -1), -manifest["time"]

    return sorted(found, key=age)
