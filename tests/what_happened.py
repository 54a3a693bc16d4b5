"""What a test's runs and labs say of themselves, for the report of its failure."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmlab.tracking import RunRecord
from mmlab.tracking.doctor import diagnose

FAILED = pytest.StashKey[bool]()
"""In a test's stash: whether it, or what it needs, has failed."""
LINES = 25
"""Last lines of each file."""
WIDTH = 400
"""Characters of a line."""


def what_happened(place: Path, since: float) -> list[tuple[str, str]]:
    """Of runs and labs below `place` that have changed since then: a title and a text each."""
    found = []
    for path in _changed(place, "events.jsonl", since):
        found.append((f"run {path.parent.relative_to(place)}", "\n".join(_run(path.parent))))
    for path in _changed(place, "keeper.log", since):
        log = path.read_text(errors="replace").splitlines()[-LINES:]
        found.append((f"lab {path.parent.relative_to(place)}", "\n".join(log)))
    return found


def _changed(place: Path, name: str, since: float) -> Iterator[Path]:
    for path in sorted(place.rglob(name)):
        if path.is_file() and path.stat().st_mtime >= since:
            yield path


def _run(root: Path) -> Iterator[str]:
    """Its last events but for all steps before the last, its failures, and where its ranks are."""
    lines = (root / "events.jsonl").read_text(errors="replace").splitlines()
    told = [line for line in lines[:-1] if not _is_step(line)] + lines[-1:]
    yield from (line[:WIDTH] for line in told[-LINES:])
    for path in sorted(root.glob("failures/*/rank-*.json")):
        yield f"{path.parent.name} {path.read_text(errors='replace')[:WIDTH]}"
    record = RunRecord(root)
    for beacon in record.beacons():
        yield str(beacon)
    yield diagnose(record).text


def _is_step(line: str) -> bool:
    try:
        return bool(json.loads(line).get("kind") == "step")
    except ValueError:
        return False
