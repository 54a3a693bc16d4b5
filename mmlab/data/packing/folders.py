"""A plain folder: pictures, each with a .txt or .json of the same name beside it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mmlab.data.packing.jsons import caption_record
from mmlab.data.packing.options import Record
from mmlab.errors import DataError

PICTURES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
_TEXTS = (".txt", ".json")


def _files(folder: Path, follow_links: bool) -> Iterator[tuple[str, str]]:
    """(folder relative to `folder`, name) of each picture and text, sorted within each folder; hidden ones left out."""

    def failed(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be read ({error.strerror}).") from None

    seen = set()
    for at, folders, names in os.walk(folder, followlinks=follow_links, onerror=failed):
        if follow_links:  # a link to a folder above would be walked for ever
            place = os.path.realpath(at)
            if place in seen:
                folders.clear()
                continue
            seen.add(place)
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        relative = os.path.relpath(at, folder)
        for name in sorted(names):
            if not name.startswith(".") and os.path.splitext(name)[1].lower() in (*PICTURES, *_TEXTS):
                yield ("" if relative == "." else relative), name


def folder_fingerprint(folder: Path, follow_links: bool) -> str:
    """A hash of names, sizes and times of the files that would be packed. DataError when there is no picture."""
    total, pictures = hashlib.sha256(), 0
    for at, name in _files(folder, follow_links):
        pictures += os.path.splitext(name)[1].lower() in PICTURES
        try:
            stat = os.stat(os.path.join(folder, at, name))
            state = f"{stat.st_size} {stat.st_mtime_ns}"
        except OSError:
            state = "missing"
        total.update(os.fsencode(os.path.join(at, name)) + f"\0{state}\n".encode())
    if not pictures:
        raise DataError(f"{folder}: no pictures in it ({' '.join(PICTURES)}), nor parquet files. Name another folder.")
    return total.hexdigest()


def folder_records(folder: Path, follow_links: bool, report: Callable[[int, int], None] | None) -> Iterator[Record]:
    """A record for each picture, folder by folder in the order of names; a text without a picture is a problem."""
    groups: dict[tuple[str, str], list[str]] = {}
    for at, name in _files(folder, follow_links):
        groups.setdefault((at, os.path.splitext(name)[0]), []).append(name)
    number = 0
    for done, ((at, _), names) in enumerate(groups.items()):
        if report:
            report(done, len(groups))
        texts = {os.path.splitext(name)[1].lower(): name for name in names if name.lower().endswith(_TEXTS)}
        pictures = [name for name in names if not name.lower().endswith(_TEXTS)]
        said, problem = _said(folder / at, texts) if pictures else (None, "a text without a picture of its name")
        for name in pictures or names:
            path = os.path.join(at, name)
            if problem:
                yield Record(number, path, problem=problem)
            elif isinstance(said, dict):
                yield Record(number, path, (path,), said)
            else:
                record = caption_record(number, path, (path,), said)
                yield Record(number, path, record.pictures, record.text, record.problem)
            number += 1


def _said(folder: Path, texts: dict[str, str]) -> tuple[Any, str]:
    """(caption or the json's conversation, problem) of the files beside a picture: a conversation in a json goes
    before a txt, a txt before a json's caption."""
    value: Any = None
    if name := texts.get(".json"):
        try:
            value = json.loads((folder / name).read_bytes())
        except (OSError, ValueError, RecursionError) as error:
            return None, f"{name} beside it cannot be read ({error})"
        turns = value.get("conversations", value.get("messages")) if isinstance(value, dict) else value
        if isinstance(turns, list):
            return {"conversations": turns}, ""
        value = value.get("caption", value.get("text")) if isinstance(value, dict) else value
    if name := texts.get(".txt"):
        try:
            return (folder / name).read_bytes().decode("utf-8-sig"), ""
        except (OSError, UnicodeDecodeError) as error:
            return None, f"{name} beside it cannot be read ({error})"
    if value is None:
        return None, "no .txt or .json with a caption beside it"
    return value, ""
