"""A run's weights as Hugging Face classes read them. `mmlab.cluster.export` starts this module as a process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from mmlab.errors import MmlabError
from mmlab.messages.locations import Location
from mmlab.models.weights import export_adapters, export_weights
from mmlab.plan import Plan
from mmlab.train.checkpoint import find, read_manifest, read_weights


def export_checkpoint(
    checkpoints: Path | Location, folder: Path, step: int | None = None, name: str = "", adapters: bool = False
) -> list[Path]:
    """Write a checkpoint's weights as safetensors with Hugging Face names; returns the files.

    `checkpoints` is a run's folder of checkpoints; the one of a name, of a step, else the newest is taken, whatever the
    layout that saved it. LoRA's adapters are merged into the weights, or with `adapters` written alone in PEFT's
    layout. CheckpointError when there is none or it is damaged; PlanError from a damaged manifest.
    """
    source = find(checkpoints, step, name)
    plan = Plan.loads(read_manifest(source)["plan"], f"checkpoint {source.name}")
    values = read_weights(source)
    return (export_adapters if adapters else export_weights)(folder, plan, values)


def main(arguments: list[str]) -> int:
    """Arguments of `export_checkpoint` as one JSON object; prints the files as JSON. 1 and a sentence when it fails."""
    given = json.loads(arguments[0])
    try:
        where = Location(given["checkpoints"]), Path(given["folder"])
        files = export_checkpoint(*where, given["step"], given["name"], given["adapters"])
    except (MmlabError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps([str(file) for file in files]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
