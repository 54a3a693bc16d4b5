"""Exporting weights, in a process of its own."""

from __future__ import annotations

from pathlib import Path

from mmlab.cluster.apart import apart
from mmlab.messages.locations import Location


def export(
    checkpoints: Path | Location, folder: Path, step: int | None = None, name: str = "", adapters: bool = False
) -> list[Path]:
    """Write a checkpoint's weights into a folder, as `mmlab.train.export.export_checkpoint` does; returns the files.

    CheckpointError with the reason when it fails.
    """
    given = {"checkpoints": str(checkpoints), "folder": str(folder), "step": step, "name": name, "adapters": adapters}
    return [Path(file) for file in apart("mmlab.train.export", given, "exporting")]
