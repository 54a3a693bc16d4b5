"""A run's weights as Hugging Face classes read them. `mmlab.cluster.export` starts this module as a process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from mmlab.errors import CheckpointError, MmlabError
from mmlab.models.weights import export_adapters, export_weights
from mmlab.plan import Plan
from mmlab.train.checkpoint import find, quiet, read_manifest


def export_checkpoint(
    checkpoints: Path, folder: Path, step: int | None = None, name: str = "", adapters: bool = False
) -> list[Path]:
    """Write a checkpoint's weights as safetensors with Hugging Face names; returns the files.

    `checkpoints` is a run's folder of checkpoints; the one of a name, of a step, else the newest is taken, whatever the
    layout that saved it. LoRA's adapters are merged into the weights, or with `adapters` written alone in PEFT's
    layout. CheckpointError when there is none or it is damaged; PlanError from a damaged manifest.
    """
    source = find(checkpoints, step, name)
    plan = Plan.loads(read_manifest(source)["plan"], f"checkpoint {source.name}")
    try:
        stored = dcp.FileSystemReader(source).read_metadata().state_dict_metadata
        values = {
            key.removeprefix("model."): torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
            for key, entry in stored.items()
            if key.startswith("model.") and isinstance(entry, TensorStorageMetadata)
        }
        with quiet():
            dcp.load({f"model.{key}": value for key, value in values.items()}, checkpoint_id=source, no_dist=True)
    except (dcp.CheckpointException, OSError, EOFError) as error:
        raise CheckpointError(f"checkpoint {source.name} cannot be read: {error}") from None
    return (export_adapters if adapters else export_weights)(folder, plan, values)


def main(arguments: list[str]) -> int:
    """Arguments of `export_checkpoint` as one JSON object; prints the files as JSON. 1 and a sentence when it fails."""
    given = json.loads(arguments[0])
    try:
        where = Path(given["checkpoints"]), Path(given["folder"])
        files = export_checkpoint(*where, given["step"], given["name"], given["adapters"])
    except (MmlabError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps([str(file) for file in files]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
