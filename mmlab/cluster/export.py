"""Exporting weights in a process of its own: whoever asks (a kernel, the command line) does not load torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from mmlab.errors import CheckpointError
from mmlab.messages.locations import Location


def export(
    checkpoints: Path | Location, folder: Path, step: int | None = None, name: str = "", adapters: bool = False
) -> list[Path]:
    """Write a checkpoint's weights into a folder, as `mmlab.train.export.export_checkpoint` does; returns the files.

    CheckpointError with the reason when it fails.
    """
    given = {"checkpoints": str(checkpoints), "folder": str(folder), "step": step, "name": name, "adapters": adapters}
    command = [sys.executable, "-m", "mmlab.train.export", json.dumps(given)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise CheckpointError(done.stderr.strip().rpartition("\n")[2] or f"exporting ended with {done.returncode}")
    return [Path(file) for file in json.loads(done.stdout)]
