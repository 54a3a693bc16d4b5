"""How a picture becomes tiles: the grid that is closest to its shape, chosen from its header alone.

After InternVL 1.5 (Chen et al. 2024, section 3.3, "Dynamic High-Resolution") and LLaVA-NeXT (Liu et al. 2024).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from PIL import Image

if TYPE_CHECKING:
    from mmlab.plan.schema import Plan


class Grid(NamedTuple):
    """`columns` x `rows` tiles cut from a picture; with `thumbnail` one more, the whole picture, after them."""

    columns: int = 1
    rows: int = 1
    thumbnail: bool = False

    @property
    def tiles(self) -> int:
        """Squares that the picture becomes."""
        return self.columns * self.rows + self.thumbnail


WHOLE = Grid()
"""The whole picture as one tile."""


Box = tuple[float, float, float, float]
"""Left, top, right and bottom of a part of a picture, in pixels."""


class Picture(NamedTuple):
    """Where a picture lies (shard of the data source, byte offset, bytes) and how it is tiled."""

    shard: int
    offset: int
    size: int
    grid: Grid = WHOLE


@dataclass(frozen=True)
class Tiling:
    """Chooses grids: `size` pixels a side of a tile, `tokens` image tokens of one, at most `max_tiles` cut from a
    picture, `seq_len` input tokens of a sample."""

    size: int
    tokens: int
    seq_len: int
    max_tiles: int = 1
    thumbnail: bool = True

    @classmethod
    def of(cls, plan: Plan) -> Tiling:
        """As the plan says."""
        vision, data = plan.model.vision, plan.data
        return cls(vision.image_size, vision.tokens_per_tile, data.seq_len, data.max_tiles, data.thumbnail)

    @cached_property
    def _grids(self) -> tuple[Grid, ...]:
        """All grids of at most `max_tiles`, smallest first. A picture that is one tile is its own thumbnail."""
        found = [
            Grid(columns, rows, self.thumbnail and columns * rows > 1)
            for columns in range(1, self.max_tiles + 1)
            for rows in range(1, self.max_tiles // columns + 1)
        ]
        return tuple(sorted(found, key=lambda grid: (grid.columns * grid.rows, grid.columns)))

    def grid(self, width: int, height: int, most: int | None = None) -> Grid:
        """The grid of at most `most` tiles, thumbnail included, whose aspect ratio is closest to that of a picture of
        `width` x `height` pixels, as it is shown; one tile where its size is not known (0).

        Of grids with equal ratios the largest whose area is less than twice the picture's: larger ones would only
        enlarge it (InternVL's rule, `find_closest_aspect_ratio`).
        """
        best, least = WHOLE, float("inf")
        if not width or not height:
            return best
        for grid in self._grids:
            if most is not None and grid.tiles > most:
                continue
            difference = abs(width / height - grid.columns / grid.rows)
            large = width * height > 0.5 * self.size**2 * grid.columns * grid.rows
            if difference < least or (difference == least and large):
                best, least = grid, difference
        return best

    def grids(self, segments: Sequence[int], sizes: Sequence[Sequence[int]]) -> tuple[Grid, ...]:
        """The grids of a sample's images of these (width, height), from the lengths of its pieces (`ShardIndex`).

        Each image has an equal share of what the sample's text leaves of `seq_len`, and one tile at least: text is not
        cut for the sake of tiles.
        """
        if self.max_tiles == 1 or not sizes:
            return (WHOLE,) * len(sizes)
        most = (self.seq_len + 1 - sum(map(abs, segments))) // self.tokens // len(sizes)
        return tuple(self.grid(width, height, max(1, most)) for width, height in sizes)


def cut(image: Image.Image, size: int, grid: Grid, box: Box | None = None) -> np.ndarray:
    """An RGB picture as tiles, uint8 [tiles, S, S, 3]: row by row, the thumbnail last.

    Resized to columns x rows tiles (bicubic with antialiasing; the aspect ratio is not kept, as in SigLIP) from its
    pixels in `box`, by default all.
    """
    box = box or (0, 0, image.width, image.height)
    columns, rows = grid.columns, grid.rows
    tiles = split(np.asarray(_resized(image, columns * size, rows * size, box), dtype=np.uint8), size)
    if not grid.thumbnail:
        return tiles
    return np.concatenate([tiles, np.asarray(_resized(image, size, size, box), dtype=np.uint8)[None]])


def split(whole: np.ndarray, size: int) -> np.ndarray:
    """Pixels [rows x S, columns x S, 3] as tiles [rows x columns, S, S, 3], row by row."""
    rows, columns = whole.shape[0] // size, whole.shape[1] // size
    return whole.reshape(rows, size, columns, size, 3).transpose(0, 2, 1, 3, 4).reshape(-1, size, size, 3)


def _resized(image: Image.Image, width: int, height: int, box: Box) -> Image.Image:
    if box == (0, 0, width, height) == (0, 0, *image.size):
        return image
    return image.resize((width, height), Image.Resampling.BICUBIC, box)
