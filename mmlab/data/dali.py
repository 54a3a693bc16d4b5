"""JPEG decoded by NVIDIA DALI: on CUDA by the GPU's decoder, else on its CPU threads, by one pipeline.

On a GPU this has never run: the machines that it was made on have none.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from mmlab.data.decode import decode_into
from mmlab.data.decoder import Batch
from mmlab.data.shards import ShardFiles
from mmlab.data.tiling import Picture, split
from mmlab.errors import DataError

CHUNK = 8
"""Pictures in one run of the pipeline: whole ones of 12 megapixels take 36 MB each while they are resized."""


def takes(data: bytes) -> bool:
    """Whether DALI is to decode a picture: a JPEG, whole, in colour or grey. DALI reads other kinds too, but not as
    Pillow does: it drops transparency, makes other colours of CMYK, and fills what a cut file lacks with grey."""
    if not (data.startswith(b"\xff\xd8") and data.endswith(b"\xff\xd9")):
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(io.BytesIO(data)) as image:
                return image.mode in ("RGB", "L")
    except Exception:  # Pillow then says what is wrong with it
        return False


class DaliDecoder:
    """Decodes batches with DALI's pipeline in one thread, which has `workers` threads of its own (at least one).

    Pixels differ by 2 of 255 at most from those that Pillow decodes at full size (0.3 in the mean); by 2 in the mean
    from the Pillow backend's, which decodes at the smallest size that does. What DALI does not take or cannot decode is
    left to Pillow, so that the same pictures are bad. DataError when DALI is not installed.
    """

    def __init__(self, shards: Sequence[Path], size: int, workers: int = 0) -> None:
        try:
            import nvidia.dali  # noqa: F401 - a second or more, and only where it is asked for
        except ImportError as error:
            raise DataError(
                f'data.backend = "dali": NVIDIA DALI cannot be imported where this rank runs ({error}). pip install '
                '"mmlab[dali]" there, or set data.backend=pillow.'
            ) from None
        self.size, self.threads = size, max(1, workers)
        self.files = ShardFiles(shards)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="dali")
        self._pipelines: dict[bool, Any] = {}

    def start(self, pictures: Sequence[Picture]) -> Batch:
        """A few pictures at once, each on one of DALI's threads."""
        batch = Batch(np.empty((sum(p.grid.tiles for p in pictures), 3, self.size, self.size), dtype=np.uint8))
        first = 0
        for i in range(0, len(pictures), CHUNK):
            chunk = pictures[i : i + CHUNK]
            count = sum(picture.grid.tiles for picture in chunk)
            batch.jobs.append(self._executor.submit(self._decode, batch.tiles[first : first + count], chunk))
            first += count
        return batch

    def _decode(self, tiles: np.ndarray, pictures: Sequence[Picture]) -> list[str]:
        """Decode pictures into their tiles, uint8 [tiles, 3, S, S]; the reason for each."""
        self.files.prepare((picture.shard, picture.offset, picture.size) for picture in pictures)
        found = [self.files.read(picture.shard, picture.offset, picture.size) for picture in pictures]
        places = np.split(tiles, np.cumsum([picture.grid.tiles for picture in pictures])[:-1])
        mine = [i for i, data in enumerate(found) if takes(data)]
        done = set(mine) if mine and self._run(mine, pictures, found, places) else set()
        return ["" if i in done else decode_into(places[i], data, pictures[i].grid) for i, data in enumerate(found)]

    def _run(
        self, mine: Sequence[int], pictures: Sequence[Picture], found: Sequence[bytes], places: Sequence[np.ndarray]
    ) -> bool:
        """Have the pipeline decode some of the pictures; False when it could not decode one, and so none."""
        thumbnails = any(pictures[i].grid.thumbnail for i in mine)
        try:
            pipeline = self._pipeline(thumbnails)
            pipeline.feed_input("encoded", [np.frombuffer(found[i], dtype=np.uint8) for i in mine])
            sides = [(pictures[i].grid.rows * self.size, pictures[i].grid.columns * self.size) for i in mine]
            pipeline.feed_input("sides", [np.array(side, dtype=np.float32) for side in sides])
            outputs = [output.as_cpu() for output in pipeline.run()]
        except RuntimeError:  # one damaged picture fails the run, and the pipeline is of no use afterwards
            self._pipelines.clear()
            return False
        for number, i in enumerate(mine):
            grid = pictures[i].grid
            cuts = split(np.asarray(outputs[0][number]), self.size)
            np.copyto(places[i][: len(cuts)], cuts.transpose(0, 3, 1, 2))
            if grid.thumbnail:
                np.copyto(places[i][-1], np.asarray(outputs[1][number]).transpose(2, 0, 1))
        return True

    def _pipeline(self, thumbnails: bool) -> Any:
        """Decode, turn upright, resize (cubic with antialiasing) to the grid and, where asked, to one tile."""
        if thumbnails not in self._pipelines:
            from nvidia.dali import Pipeline, fn
            from nvidia.dali import types as dali_types

            types: Any = dali_types  # its stubs miss them
            gpu = torch.cuda.is_available()
            how = {"device_id": torch.cuda.current_device() if gpu else None, "prefetch_queue_depth": 1}
            pipeline = Pipeline(CHUNK, self.threads, exec_async=False, exec_pipelined=False, **how)
            with pipeline:
                encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1)
                sides = fn.external_source(name="sides", dtype=types.FLOAT, ndim=1)
                image = fn.decoders.image(encoded, device="mixed" if gpu else "cpu", output_type=types.RGB)
                cubic = {"interp_type": types.INTERP_CUBIC, "antialias": True}
                small = [fn.resize(image, size=[self.size, self.size], **cubic)] if thumbnails else []
                pipeline.set_outputs(fn.resize(image, size=sides, **cubic), *small)
            pipeline.build()
            self._pipelines[thumbnails] = pipeline
        return self._pipelines[thumbnails]

    def close(self) -> None:
        """End the thread and DALI's."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._pipelines.clear()
        self.files.close()
