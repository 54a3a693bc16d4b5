"""Small shards and plans for tests, written with the tar module so that they do not rest on what is tested."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from mmlab.data.manifest import ManifestSample, Split, StepManifest
from mmlab.data.tiling import Grid
from mmlab.plan.schema import Plan


def picture(color: tuple[int, ...] = (200, 30, 30), size: tuple[int, int] = (24, 16), **save: Any) -> bytes:
    """A one-coloured picture as file bytes (PNG unless `format` says otherwise)."""
    mode = {3: "RGB", 4: "RGBA"}[len(color)]
    return encode(Image.new(mode, size, color), **save)


def encode(image: Image.Image, **save: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, **{"format": "PNG", **save})
    return buffer.getvalue()


def write_tar(path: Path, files: Iterable[tuple[str, bytes]]) -> Path:
    """A plain tar with these (name, content) in order."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def numbered_shards(folder: Path, shards: int = 2, samples: int = 5) -> Path:
    """`shards` tars of captioned pictures with keys 000000 on; colours tell samples apart."""
    number = 0
    for shard in range(shards):
        files = []
        for _ in range(samples):
            color = (number * 37 % 256, number * 91 % 256, number * 17 % 256)
            files += [(f"{number:06d}.png", picture(color)), (f"{number:06d}.txt", f"picture {number}".encode())]
            number += 1
        write_tar(folder / f"train-{shard:06d}.tar", files)
    return folder


def small_plan(path: Path | str, **overrides: Mapping[str, Any]) -> Plan:
    """A plan for 32-pixel images of 4 tokens on the data at `path`; `overrides` per section, as dicts."""
    values: dict[str, Any] = {
        "model": {
            "vision": {"image_size": 32, "patch_size": 16, "hidden": 16, "layers": 1},
            "language": {"vocab_size": 320},
        },
        "parallel": {},
        "data": {"path": str(path), "global_batch": 4, "seq_len": 64, "lanes": 3},
    }
    for section, fields in overrides.items():
        values.setdefault(section, {}).update(fields)
    return Plan(**values)


def manifest_of(tiles: list[int], split: Split) -> StepManifest:
    """A manifest whose samples have these numbers of tiles."""
    samples = tuple(
        ManifestSample(f"s/{i}", 0, i, 0, 0, 10 + i, 3 + i, (Grid(t),) * (t > 0)) for i, t in enumerate(tiles)
    )
    return StepManifest(1, samples, split)


def conversation_json(*turns: tuple[str, str]) -> bytes:
    values = []
    for prompt, answer in turns:
        values += [{"from": "human", "value": prompt}, {"from": "gpt", "value": answer}]
    return json.dumps({"conversations": values}).encode()


def pixels_of(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("RGB"), dtype=np.int64)
