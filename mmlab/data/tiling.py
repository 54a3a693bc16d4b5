"""How a picture becomes tiles."""

from __future__ import annotations

from typing import NamedTuple


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


class Picture(NamedTuple):
    """Where a picture lies (shard of the data source, byte offset, bytes) and how it is tiled."""

    shard: int
    offset: int
    size: int
    grid: Grid = WHOLE
