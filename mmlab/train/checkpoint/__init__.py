"""Checkpoints: torch.distributed.checkpoint under global names, complete when the manifest, written last, exists.

Parameters are named globally, never by rank or stage, so any layout loads any checkpoint: `model.<global name>`,
`optimizer.<global name>.{step,exp_avg,exp_avg_sq}`; what compression keeps (see `kept`); rank 0's random streams
(`rng`). What is frozen lies once for each content beside the checkpoints, which refer to it. `Saves` decides when.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmlab.messages.checkpoints import FROZEN, MANIFEST
from mmlab.messages.locations import Location
from mmlab.parallel.mesh import Mesh
from mmlab.plan import Plan
from mmlab.train.build import Built
from mmlab.train.checkpoint.catalog import Retention, candidates, find, read_manifest
from mmlab.train.checkpoint.loading import agree, load, quiet, read_weights
from mmlab.train.checkpoint.state import Staging, contents, saved_state, state_dict
from mmlab.train.checkpoint.writing import Content, Save

__all__ = [
    "FROZEN", "MANIFEST", "Content", "Retention", "Save", "Staging", "agree", "candidates", "contents", "find", "load",
    "quiet", "read_manifest", "read_weights", "save", "saved_state", "state_dict",
]  # fmt: skip


def save(plan: Plan, mesh: Mesh, built: Built, folder: Path, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Save what all ranks hold into a new folder, frozen modules too, and wait; all ranks together. Returns the
    manifest on rank 0.

    CheckpointError on every rank when it cannot be written; nothing of it is left then.
    """
    state, frozen = saved_state(plan, mesh, built)
    content = Content(state | {key: value for part in frozen.values() for key, value in part.items()}, extra)
    made = Save(mesh, Location(folder.parent), folder.name, content, str(folder))
    made.start()
    made.wait()
    return made.manifest
