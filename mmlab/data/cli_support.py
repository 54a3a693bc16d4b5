"""What a command line says about data: `mmlab data make emoji|shapes DIR`. No torch."""

from __future__ import annotations

import json
from pathlib import Path

from mmlab.data.datasets import BUILT_IN, DESCRIPTION, make
from mmlab.data.index import Progress

__all__ = ["BUILT_IN", "make_set"]


def make_set(
    name: str, folder: Path | str, *, samples: int | None = None, seed: int = 0, progress: Progress | None = None
) -> str:
    """Make a built-in set in a folder; returns one paragraph that says what is there and how to train on it.

    `samples`: training samples (None: the set's own number). `progress(done, total, what)` is called as it goes on.
    DataError when there is no such set, a package is missing, or the folder is in use or cannot be written.
    """
    folder = make(name, folder, samples=samples, seed=seed, progress=progress)
    about = json.loads((folder / DESCRIPTION).read_bytes())
    counts = ", ".join(f"{count:,} {split.replace('_', '-')}" for split, count in about["samples"].items())
    return (
        f"{folder}: {name} {about['version']}, {counts} samples ({about['licence']}).\n"
        f'Train on it with data.path="{folder}"; the tokenizer and the held-out samples come with it.'
    )
