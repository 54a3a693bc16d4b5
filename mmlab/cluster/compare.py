"""Comparing checkpoints, in a process of its own."""

from __future__ import annotations

from typing import Any

from mmlab.cluster.apart import apart
from mmlab.errors import CheckpointError
from mmlab.messages.checkpoints import read_manifest
from mmlab.messages.locations import Location
from mmlab.plan import Plan
from mmlab.tracking.compare import Comparison

TIMEOUT = 600.0
"""Seconds that comparing may take: weights are read once, so 600 s are 300 GB each at 1 GB/s."""


def compare(first: dict[str, Any], second: dict[str, Any], timeout: float | None = TIMEOUT) -> Comparison:
    """What differs between two checkpoints, by their rows with "run" (see `RunRecord.checkpoints`).

    CheckpointError with the reason when one is damaged or cannot be read, or `timeout` seconds are over.
    """
    plans = [_plan(row) for row in (first, second)]
    found = apart("mmlab.train.compare", [first["path"], second["path"]], "comparing", timeout)
    return Comparison(first, second, plans[0].diff(plans[1]), **found)


def _plan(row: dict[str, Any]) -> Plan:
    manifest = read_manifest(Location(row["path"]))
    if not isinstance(manifest, dict):
        raise CheckpointError(f"checkpoint {row['name']} is gone or damaged: it has no manifest that can be read")
    return Plan.loads(str(manifest.get("plan", "")), f"checkpoint {row['name']}")
