"""What a pack is asked for, and what passes from stage to stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMATS = ("coco", "llava", "csv", "tsv", "parquet", "folder")
_NOT_IN_THE_BYTES = ("workers", "strict", "max_skipped", "format", "images")
"""How it is packed, not what; format and images are said of the source, as they were found to be."""


@dataclass(frozen=True)
class PackOptions:
    """How to pack. `resize`: pixels a side of a tile: larger pictures keep what the grid of at most `tiles` of them
    shows (with one tile: that many on the shorter side); 0 keeps all. `shard_mb`: megabytes (1e6 bytes) of a shard;
    `held_out`: share of the pictures, 0 to 1; `max_skipped`: share of the records, 0 to 1."""

    format: str = ""
    images: Path | None = None
    image_column: str = ""
    text_column: str = ""
    resize: int = 0
    tiles: int = 1
    quality: int = 90
    captions: str = "all"
    held_out: float = 0.0
    samples_per_shard: int = 1024
    shard_mb: float = 1000.0
    follow_links: bool = False
    workers: int = 0
    strict: bool = False
    max_skipped: float = 0.05

    def in_the_bytes(self) -> dict[str, Any]:
        """The options on which the packed bytes depend, as JSON values."""
        return {name: value for name, value in asdict(self).items() if name not in _NOT_IN_THE_BYTES}


@dataclass(frozen=True)
class Record:
    """One row of a source. `pictures`: paths, or the bytes themselves; `text`: what the sample's json will hold.

    `origin` says where it stands, such as "row 17". `problem`: why it can be no sample, else empty.
    """

    number: int
    origin: str
    pictures: tuple[str | bytes, ...] = ()
    text: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""


@dataclass(frozen=True)
class Prepared:
    """A record ready to be written: `members` (extension, bytes) in order; or the `problem` with it.

    `digest`: of pictures and text, 64 bits, alike for duplicates; `side`: 0 to 1, of the first picture (or the text),
    so that all that is said of one picture falls on the same side of the held-out split.
    """

    number: int
    origin: str
    members: tuple[tuple[str, bytes], ...] = ()
    digest: int = 0
    side: float = 0.0
    problem: str = ""
    copied: int = 0


def shown(name: str) -> str:
    """A file's name that can be printed and written as UTF-8, also when its bytes are none."""
    try:
        return name.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
    except UnicodeEncodeError:  # half a surrogate pair, out of a JSON
        return name.encode("utf-8", "replace").decode()
