"""Decoding ahead: the images of steps to come are read and decoded while a step computes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from mmlab.data.dali import DaliDecoder
from mmlab.data.decoder import Batch, Decoder, PillowDecoder
from mmlab.data.manifest import StepManifest
from mmlab.data.pipeline import DataSource
from mmlab.data.tiling import Picture
from mmlab.plan.data import Backend


class Prefetcher:
    """Decodes a rank's own images ahead.

    `submit` a step's manifest as soon as it is known, `take` it when its turn comes. A step is known by its manifest
    itself, so that one of before a restore cannot be taken for one of after it. Steps may be taken in another thread;
    `close` (or a `with` block) ends what decodes. `workers` and `backend` as in the plan's data section; DataError when
    the backend is not installed.
    """

    def __init__(self, source: DataSource, workers: int = 0, backend: Backend = "pillow") -> None:
        self.source = source
        make: type[Decoder] = DaliDecoder if backend == "dali" else PillowDecoder
        self.decoder = make(source.shards, source.image_size, workers)
        self._steps: dict[int, tuple[StepManifest, dict[int, list[Picture]], Batch]] = {}

    def submit(self, manifest: StepManifest, positions: Sequence[int]) -> None:
        """Start to decode the images of the samples at `positions` (those this rank owns). DataError as for `take`."""
        pictures = {position: self.source.pictures(manifest.samples[position]) for position in positions}
        batch = self.decoder.start([picture for found in pictures.values() for picture in found])
        self._steps[id(manifest)] = (manifest, pictures, batch)

    def done(self, manifest: StepManifest) -> bool:
        """Whether a submitted step is decoded."""
        return self._steps[id(manifest)][2].done()

    def take(self, manifest: StepManifest) -> tuple[dict[int, Tensor], set[int]]:
        """({position: pixels float32 [tiles, 3, S, S]}, positions with a bad picture) of a submitted step; waits.

        The pixels lie behind one another in one buffer, in the order of the positions. KeyError when the step was not
        submitted; DataError when a shard cannot be read or a decode process died.
        """
        _, pictures, batch = self._steps.pop(id(manifest))
        return self.source.collect(manifest, pictures, *batch.result())

    def drop(self) -> None:
        """Forget everything submitted (after a restore); what has not begun is not decoded."""
        for _, _, batch in list(self._steps.values()):
            batch.drop()
        self._steps.clear()

    def close(self) -> None:
        """Forget what is submitted and end the thread or processes."""
        self.drop()
        self.decoder.close()

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
