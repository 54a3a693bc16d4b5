"""Pictures and text as walks of their own: with `data.text_share` each source is read as two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mmlab.data.index import ShardIndex
from mmlab.errors import DataError

TEXT, IMAGES = "text", "images"


@dataclass(frozen=True)
class Mixture:
    """What the order of samples is made of, walk by walk: shards and their indexes, how many shards each walk has,
    its weight (none: by size), and for each shard which kind of sample is read from it ("" for all)."""

    shards: list[Path]
    indexes: list[ShardIndex]
    counts: list[int]
    weights: tuple[float, ...]
    kinds: list[str]


def mix(
    sources: Sequence[Sequence[Path]], indexes: Sequence[ShardIndex], weights: Sequence[float], text_share: float
) -> Mixture:
    """The walks of a plan's sources; with a `text_share` text-only samples and those with images apart, the first
    having that share of all samples and both mixed by the sources' weights. DataError where one of them is missing."""
    shards = [shard for source in sources for shard in source]
    if not text_share:
        return Mixture(shards, list(indexes), [len(s) for s in sources], tuple(weights), [""] * len(shards))
    walks: list[tuple[str, list[Path], list[ShardIndex], float]] = []
    first = 0
    for number, source in enumerate(sources):
        own = indexes[first : first + len(source)]
        first += len(source)
        for kind in (IMAGES, TEXT):
            parts = [index.select(without_images(index) == (kind == TEXT)) for index in own]
            if size := sum(map(len, parts)):
                walks.append((kind, list(source), parts, weights[number] if weights else float(size)))
    total = {kind: sum(weight for of, *_, weight in walks if of == kind) for kind in (IMAGES, TEXT)}
    for kind, what in ((TEXT, "text-only samples"), (IMAGES, "samples with images")):
        if not total[kind]:
            raise DataError(
                f"data.text_share = {text_share:g}: the data have no {what}. Add some, or set data.text_share=0."
            )
    share = {TEXT: text_share, IMAGES: 1 - text_share}
    return Mixture(
        [shard for _, own, _, _ in walks for shard in own],
        [index for _, _, parts, _ in walks for index in parts],
        [len(own) for _, own, _, _ in walks],
        tuple(share[kind] * weight / total[kind] for kind, _, _, weight in walks),
        [kind for kind, own, _, _ in walks for _ in own],
    )


def without_images(index: ShardIndex) -> np.ndarray:
    """Whether each sample of a shard is text alone, bool [n]."""
    return np.diff(index.image_first) == 0
