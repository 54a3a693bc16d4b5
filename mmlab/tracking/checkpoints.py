"""What a run's checkpoints hold and how they descend from one another; naming and deleting them.

From files alone, beside a live run that saves and prunes: a name is a new manifest (one file that is whole or absent),
a removal takes the manifest first, and what is frozen is left to the run while it lives.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmlab.errors import CheckpointError, MmlabError
from mmlab.messages.checkpoints import (
    FROZEN,
    MANIFEST,
    Found,
    called,
    check_name,
    flaw,
    inherited,
    manifests,
    newest_first,
    read_manifest,
    seal,
)
from mmlab.messages.events import ENDED
from mmlab.messages.files import read_json
from mmlab.messages.locations import Location
from mmlab.messages.moves import read_move

if TYPE_CHECKING:
    from mmlab.plan import Plan
    from mmlab.tracking.record import RunRecord


@lru_cache(maxsize=256)
def _layout(plan_toml: str) -> str:
    """The layout of a plan in words; empty where the plan is damaged."""
    from mmlab.plan import Plan

    try:
        return layout_text(Plan.loads(plan_toml))
    except MmlabError:
        return ""


def layout_text(plan: Plan) -> str:
    """The layout of a plan in words: "6 ranks: vision_dp 2, tp 2, pp 2, zero1"."""
    p = plan.parallel
    parts = p.degrees_text()
    parts += [value for value in (p.sharding,) if value != "none"]
    parts += ["DeepSpeed"] if p.engine == "deepspeed" else []
    ranks = f"{plan.world_size} rank{'s' * (plan.world_size > 1)}"
    return f"{ranks}: {', '.join(parts)}" if parts else ranks


def rows(run: str, location: Location) -> list[tuple[dict[str, Any], Found]]:
    """The checkpoints of a run as `RunRecord.checkpoints` has them, each with its folder and manifest."""
    try:
        known = manifests(location)
    except OSError as error:
        raise CheckpointError(f"the checkpoints of run {run} cannot be read: {error}") from None
    found = []
    for folder, manifest in known:
        row = {key: manifest.get(key) for key in ("step", "lineage", "time", "loss", "world_size", "reason")}
        frozen = manifest.get("frozen", {})
        origin = manifest.get("origin") or {}
        row |= {
            "bytes": sum(file["size"] for file in manifest.get("files", {}).values()),
            "shared_bytes": sum(part["bytes"] for part in frozen.values()),
            "frozen": sorted(frozen),
            "periodic": bool(manifest.get("periodic")),
            "layout": _layout(str(manifest.get("plan", ""))),
            "samples": _samples(manifest.get("cursors")),
            "origin": f"{origin['run']}, {origin['name']}" if origin else "",
        }
        found.append(({"name": called(folder, manifest), **row, "path": str(folder)}, (folder, manifest)))
    return sorted(found, key=lambda pair: (pair[0]["step"], pair[0]["time"]))


def _samples(cursors: Any) -> int | None:
    """Samples that were consumed before a place in the data; None where the manifest does not say."""
    if not isinstance(cursors, dict) or "taken" not in cursors:
        return None
    return sum(cursors["taken"]) + int(cursors.get("offset", 0)) + int(cursors.get("grouped", 0))


def info(record: RunRecord, step: int | None = None, name: str = "") -> dict[str, Any]:
    """All that is known of one checkpoint: the row of `RunRecord.checkpoints` and {"plan": Plan (None where it is
    damaged), "position": where the data stands, "files": {name: bytes}, "seconds" (that saving took), "current"
    (whether the run as it stands inherits from it), "problem" (what shows without reading it; "" when nothing)}."""
    from mmlab.plan import Plan

    row, (folder, manifest) = record.found_checkpoint(step, name)
    plan: Plan | None = None
    with contextlib.suppress(MmlabError):
        plan = Plan.loads(str(manifest.get("plan", "")), f"checkpoint {row['name']}")
    return {
        **row,
        "plan": plan,
        "position": manifest.get("cursors"),
        "files": {file: entry["size"] for file, entry in manifest.get("files", {}).items()},
        "seconds": manifest.get("seconds"),
        "current": row["step"] <= inherited(record.lineages()).get(str(row["lineage"]), -1),
        "problem": problem(folder, manifest),
    }


def problem(folder: Location, manifest: dict[str, Any]) -> str:
    """What is wrong with a checkpoint, or with a frozen part that it refers to, as far as sizes and seals show."""
    above = Location(folder.address.rpartition("/")[0])
    if wrong := flaw(folder, manifest):
        return wrong
    for module, part in manifest.get("frozen", {}).items():
        place = above / FROZEN / part["folder"]
        if wrong := flaw(place, read_manifest(place)):
            return f"it refers to the frozen {module}: {wrong}"
    return ""


# -- how they descend from one another


def lineages(record: RunRecord) -> list[dict[str, Any]]:
    """All lineages of a run, oldest first: {"id", "parent", "parent_step", "step" (its last), "time", "why", "current"
    (whether the run as it stands goes through it), "last" (whether it stands there)}.

    A `parent` that is not one of them is another run's.
    """
    events, last = record.rare_events(), record.last_steps()
    known = {event["id"]: event for event in events if event["kind"] == "lineage"}
    why: dict[str, str] = {}
    for event in events:
        if event["kind"] in ("restore", "relayout"):  # the first of a lineage is what it began with
            said = f"restored {event['name']}" if event["kind"] == "restore" else "another layout"
            why.setdefault(event["lineage"], said)
    on_the_way = {event["id"] for event in record.lineages()}
    return [
        {
            "id": name, "parent": event["parent"], "parent_step": event["parent_step"],
            "step": last.get(name, event["parent_step"]), "time": event["t"],
            "why": why.get(name, "") if event["parent"] else "the start", "current": name in on_the_way,
            "last": name == next(reversed(known)),
        }
        for name, event in known.items()
    ]  # fmt: skip


def branches(record: RunRecord, others: Iterable[Path]) -> list[dict[str, Any]]:
    """The runs among other folders that were branched off this one: {"run", "dir", "name" and "step" of the
    checkpoint, "lineage"}."""
    found = []
    for folder in others:
        parent = (read_json(folder / "run.json") or {}).get("parent") or {}
        if parent.get("dir") == str(record.paths.root):
            taken = {key: parent.get(key) for key in ("name", "step", "lineage")}
            found.append({"run": folder.name, "dir": str(folder), **taken})
    return found


# -- naming and deleting


def rename(record: RunRecord, name: str, new: str) -> dict[str, Any]:
    """Give a checkpoint a name; from then on it is kept. Its folder stays. The row as it is then.

    CheckpointError for a name that cannot be one or is taken, and for a damaged checkpoint.
    """
    if not new:
        raise CheckpointError("a checkpoint's new name is empty")
    check_name(new)
    row, (folder, manifest) = record.found_checkpoint(name=name)
    taken = [other for other in record.checkpoints() if other["name"] == new and other["path"] != row["path"]]
    if taken:
        raise CheckpointError(f"run {record.id} has a checkpoint {new} already, of step {taken[0]['step']}")
    if wrong := problem(folder, manifest):
        raise CheckpointError(wrong)
    try:
        write_manifest(folder, manifest | {"given": new, "periodic": False})
    except OSError as error:
        raise CheckpointError(f"checkpoint {name} cannot be given a name: {error}") from None
    if wrong := flaw(folder, read_manifest(folder)):  # its run may have removed it meanwhile
        raise CheckpointError(wrong)
    return record.found_checkpoint(name=new)[0]


def write_manifest(folder: Location, manifest: dict[str, Any]) -> None:
    """Write a manifest with its seal into the folder that it is about."""
    folder.write(MANIFEST, json.dumps(manifest | {"seal": seal(manifest)}, indent=1).encode())


def delete(record: RunRecord, name: str, force: bool = False) -> dict[str, Any]:
    """Remove a checkpoint, and of an ended run what is frozen and referred to by no other one; its row as it was.

    CheckpointError when it cannot be removed, and for the newest good one of a live run, from which it would recover,
    unless with `force`; also for the one that a run is being moved with.
    """
    row, found = record.found_checkpoint(name=name)
    live = record.status()["state"] not in ENDED
    move = read_move(record.paths)
    if live and move is not None and move.name in (row["name"], found[0].name):
        raise CheckpointError(f"run {record.id} is about to go on from checkpoint {name}; delete it afterwards")
    if live and not force and _newest_good(record) == row["path"]:
        raise CheckpointError(
            f"{name} is the newest checkpoint of run {record.id}, which would recover from it: save another one first, "
            "or delete it with force"
        )
    try:
        found[0].remove(first=MANIFEST)
        if not live:
            _remove_unused(record)
    except OSError as error:
        raise CheckpointError(f"checkpoint {name} cannot be removed: {error}") from None
    return row


def _newest_good(record: RunRecord) -> str:
    """The folder of the checkpoint that a recovery would take; empty where there is none."""
    found = [pair for _, pair in rows(record.id, record.checkpoint_location)]
    for folder, manifest in newest_first(found, record.rare_events()):
        if not problem(folder, manifest):
            return str(folder)
    return ""


def _remove_unused(record: RunRecord) -> None:
    """Remove frozen parts that no checkpoint refers to. Only where nothing saves: a save under way may count on one."""
    location = record.checkpoint_location
    known = manifests(location, ())
    read = {folder.address for folder, _ in known}
    if any(MANIFEST in folder.sizes() for folder in location.folders() if folder.address not in read):
        return  # what that one refers to is not known: it may be readable again
    used = {part["folder"] for _, m in known for part in m.get("frozen", {}).values()}
    for place in (location / FROZEN).folders():
        if place.name not in used:
            place.remove(first=MANIFEST)


# -- what other runs begin with


def copy(source: Found, target: Location, about: dict[str, Any]) -> None:
    """Copy a checkpoint with the frozen parts that it refers to into another run's folder of checkpoints, with some
    keys of its manifest changed. OSError when it cannot be read or written: half of it is then no checkpoint."""
    folder, manifest = source
    above = Location(folder.address.rpartition("/")[0])
    for part in manifest.get("frozen", {}).values():
        _copy(above / FROZEN / part["folder"], target / FROZEN / part["folder"], {})
    _copy(folder, target / called(folder, manifest), about)


def _copy(source: Location, target: Location, about: dict[str, Any]) -> None:
    manifest = read_manifest(source)
    if wrong := flaw(source, manifest):
        raise CheckpointError(wrong)
    target.make()
    for file in manifest["files"]:
        target.take(file, source)
    write_manifest(target, {**manifest, **about})
