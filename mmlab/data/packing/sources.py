"""What a source is, and its records one by one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from mmlab.data.packing.folders import folder_fingerprint, folder_records
from mmlab.data.packing.jsons import coco_records, llava_records, starts_as
from mmlab.data.packing.options import FORMATS, PackOptions, Record
from mmlab.data.packing.tables import csv_records, parquet_files, parquet_records
from mmlab.errors import DataError

Report = Callable[[int, int], None]
"""Called with (done, total), in the source's own measure: rows, pictures or bytes."""
_SUFFIXES = {".parquet": "parquet", ".csv": "csv", ".tsv": "tsv", ".jsonl": "llava"}
_LOOK_AT = 50
"""Records whose pictures are looked for to find the folder that they lie in."""


@dataclass(frozen=True)
class Source:
    """A source of one kind: its `path`, the folder that its `images` are named in, and what its content hashes to."""

    path: Path
    format: str
    images: Path
    fingerprint: str
    options: PackOptions

    def records(self, report: Report | None = None) -> Iterator[Record]:
        """All records in order. DataError when the source cannot be read or is not of its kind."""
        return _records(self.path, self.format, self.options, report)


def open_source(path: Path, options: PackOptions) -> Source:
    """Find out what a source is and where its pictures lie. DataError when that cannot be told."""
    kind = options.format or _recognise(path)
    if kind not in FORMATS:
        raise DataError(f"--format {kind}: there is no such format. There are: {', '.join(FORMATS)}.")
    if not path.exists():
        raise DataError(f"{path}: no such file or folder.")
    if kind == "folder" and not path.is_dir():
        raise DataError(f"{path}: is a file, not a folder of pictures. Leave --format out, or name the folder.")
    if path.is_dir() and kind not in ("folder", "parquet"):
        raise DataError(f"{path}: is a folder; --format {kind} reads a file. Name the file with the captions.")
    if options.images and not options.images.is_dir():
        raise DataError(f"--images {options.images}: no such folder. Name the folder that picture names start from.")
    images = options.images or _images_folder(path, kind, options)
    return Source(path, kind, images, _fingerprint(path, kind, options), options)


def _recognise(path: Path) -> str:
    if path.is_dir():
        return "parquet" if next(path.glob("*.parquet"), None) else "folder"
    if not path.exists():
        raise DataError(f"{path}: no such file or folder. Name a folder of pictures, or the file with the captions.")
    suffix = path.suffix.lower()
    if suffix == ".json":
        return "coco" if starts_as(path) == "{" else "llava"
    if suffix not in _SUFFIXES:
        raise DataError(
            f"{path}: its name does not tell what it is (.json, .jsonl, .csv, .tsv, .parquet or a folder). Say it by "
            f"--format: {', '.join(FORMATS)}."
        )
    return _SUFFIXES[suffix]


def _records(path: Path, kind: str, options: PackOptions, report: Report | None) -> Iterator[Record]:
    if kind == "coco":
        return coco_records(path, options.captions, report)
    if kind == "llava":
        return llava_records(path, report)
    if kind == "parquet":
        return parquet_records(path, options, report)
    if kind == "folder":
        return folder_records(path, options.follow_links, report)
    return csv_records(path, options, kind, report)


def _images_folder(path: Path, kind: str, options: PackOptions) -> Path:
    """Where picture names start from: the first likely folder that has one of the first pictures."""
    if path.is_dir():
        return path
    here = path.parent
    split = path.stem.partition("_")[2]  # COCO: captions_train2017.json beside or above train2017/
    likely = [here, here / "images", here.parent, here.parent / "images"]
    if split:
        likely += [here / split, here.parent / split, here / "images" / split, here.parent / "images" / split]
    first = [p for r in islice(_records(path, kind, options, None), _LOOK_AT) for p in r.pictures if isinstance(p, str)]
    for folder in likely:
        if any(_is_file(folder / name) for name in first):
            return folder
    return here


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):
        return False


def _fingerprint(path: Path, kind: str, options: PackOptions) -> str:
    """SHA-256 of what the source says (of a folder: names, sizes and times of its files)."""
    if kind == "folder":
        return folder_fingerprint(path, options.follow_links)
    total = hashlib.sha256()
    for file in parquet_files(path) if kind == "parquet" else [path]:
        try:
            with open(file, "rb") as opened:
                total.update(hashlib.file_digest(opened, "sha256").digest())
        except OSError as error:
            raise DataError(f"{file}: cannot be read ({error.strerror}).") from None
    return total.hexdigest()
