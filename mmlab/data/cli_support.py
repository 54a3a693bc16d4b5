"""What a command line says about data: `mmlab data make`, `pack`, `check`. No torch."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mmlab.data.check import check
from mmlab.data.datasets import BUILT_IN, DESCRIPTION, make
from mmlab.data.index import Progress
from mmlab.data.packing import PackOptions, pack

__all__ = ["BUILT_IN", "check_shards", "make_set", "pack_source"]


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


def check_shards(
    pattern: str, quick: bool, workers: int, progress: Progress | None, *, named: int
) -> tuple[str, dict[str, Any]]:
    """Check shards; returns what was looked at and the first `named` bad members in words, and all of it as JSON."""
    found = check(pattern, quick=quick, workers=workers, progress=progress)
    how = "headers read" if quick else "all of it read"
    sums = f", checksums of {found.manifest:,} compared" if found.manifest and not quick else ""
    size = f"{found.bytes / 1e6:,.1f} MB"
    counts = f"{found.shards:,} shards, {found.samples:,} samples, {found.pictures:,} pictures, {size}"
    lines = [f"{pattern}: {counts}, {how}{sums}"]
    lines += [f"  {bad}" for bad in found.bad[:named]]
    if len(found.bad) > named:
        lines.append(f"  and {len(found.bad) - named:,} more (--json FILE names all)")
    bad = [asdict(one) for one in found.bad]
    return "\n".join(lines), {"path": pattern, "ok": not bad} | asdict(found) | {"bad": bad}


def pack_source(
    source: Path, out: Path, options: PackOptions, tokenizer: Path | None, progress: Progress | None, *, named: int
) -> str:
    """Pack a source; returns what is there, the first `named` records that were left out, and how to train on it.

    DataError as `mmlab.data.packing.pack` says.
    """
    packed = pack(source, out, options, tokenizer, progress)
    size = sum(shard.bytes for shard in packed.shards) / 1e6
    held_out = f" and {packed.samples('held_out'):,} held-out" if packed.samples("held_out") else ""
    begun = " (packed already)" if packed.complete else f" (went on from {packed.resumed:,})" if packed.resumed else ""
    lines = [
        f"{out}: {packed.samples('train'):,}{held_out} samples in {len(packed.shards):,} shards, {size:,.1f} MB{begun};"
        f" {packed.copied:,} of {packed.pictures:,} pictures as they were."
    ]
    for what, rows in (("skipped", packed.skipped), ("left out as duplicates", packed.duplicates)):
        if rows:
            lines.append(f"{len(rows):,} {what} (all in {out / 'report.json'}):")
            lines += [f"  {origin}: {why}" for origin, why in rows[:named]]
    lines.append(f'Train on it with data.path="{out}".')
    return "\n".join(lines)
