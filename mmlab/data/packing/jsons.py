"""Captions in JSON: COCO's, and LLaVA's conversations (an array or lines; read entry by entry)."""

from __future__ import annotations

import io
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

from mmlab.data.packing.options import Record
from mmlab.errors import DataError

_CHUNK = 1 << 20
"""Characters read at once: many entries of LLaVA's."""


def starts_as(path: Path) -> str:
    """The first character of a JSON file that is no space."""
    try:
        with open(path, encoding="utf-8-sig", errors="replace") as file:
            return file.read(4096).lstrip()[:1]
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from None


def coco_records(path: Path, captions: str, report: Callable[[int, int], None] | None) -> Iterator[Record]:
    """A record for each caption (`captions` "all") or for the first of each picture ("first"), picture by picture."""
    value = _load(path)
    if not isinstance(value, dict) or not all(isinstance(value.get(key), list) for key in ("images", "annotations")):
        raise DataError(f'{path}: is not COCO\'s JSON, an object with "images" and "annotations". Say it by --format.')
    said: dict[Any, list[Any]] = defaultdict(list)
    for annotation in value["annotations"]:
        if isinstance(annotation, dict) and "caption" in annotation:
            said[annotation.get("image_id")].append(annotation["caption"])
    if not said:
        raise DataError(f"{path}: none of its annotations has a caption. Name COCO's captions file (captions_*.json).")
    number = 0
    for done, image in enumerate(value["images"]):
        if report:
            report(done, len(value["images"]))
        name, identity = (image.get("file_name"), image.get("id")) if isinstance(image, dict) else (None, None)
        origin = f"image {identity if identity is not None else done}"
        texts = said.get(identity, []) if isinstance(identity, int | str) else []
        if not isinstance(name, str) or not texts:
            problem = "has no caption" if isinstance(name, str) else "has no file_name"
            yield Record(number, f"{origin} ({name})", problem=problem)
            number += 1
            continue
        for text in texts if captions == "all" else texts[:1]:
            yield caption_record(number, origin, (name,), text)
            number += 1


def _load(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from None
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}: is no whole JSON ({error}). Correct it; one entry a line is --format llava."
        ) from None


def caption_record(number: int, origin: str, pictures: tuple[str | bytes, ...], text: Any) -> Record:
    """A record of pictures with a caption; with a problem where there is no caption."""
    if not isinstance(text, str) or not text.strip():
        problem = "its caption is empty" if text is None or isinstance(text, str) else "its caption is no text"
        return Record(number, _with_names(origin, pictures), pictures, problem=problem)
    return Record(number, _with_names(origin, pictures), pictures, {"caption": text.strip()})


def _with_names(origin: str, pictures: tuple[str | bytes, ...]) -> str:
    names = ", ".join(name for name in pictures if isinstance(name, str))
    return f"{origin} ({names})" if names else origin


def llava_records(path: Path, report: Callable[[int, int], None] | None) -> Iterator[Record]:
    """A record for each entry: `conversations` (or `messages`), or a `caption`, with `image`, a name or a list of
    them; without one it is text alone."""
    for number, entry in enumerate(_entries(path, report)):
        origin = f"entry {number + 1}"
        if not isinstance(entry, dict):
            yield Record(number, origin, problem='is no object such as {"image": name, "conversations": [...]}')
            continue
        if isinstance(entry.get("id"), str | int):
            origin += f", id {entry['id']}"
        image = entry.get("image", entry.get("images"))
        pictures = tuple(image) if isinstance(image, list) else () if image is None else (image,)
        if not all(isinstance(name, str) for name in pictures):
            yield Record(number, origin, problem="its image is no name of a file, and no list of names")
            continue
        turns = entry.get("conversations", entry.get("messages"))
        if turns is None and isinstance(text := entry.get("caption", entry.get("text")), str):
            yield caption_record(number, origin, pictures, text)
        elif turns is None:
            yield Record(number, _with_names(origin, pictures), problem="has neither conversations nor a caption")
        elif "video" in entry and not pictures:
            yield Record(number, origin, problem="is about a video, not a picture")
        else:
            yield Record(number, _with_names(origin, pictures), pictures, {"conversations": turns})


def _entries(path: Path, report: Callable[[int, int], None] | None) -> Iterator[Any]:
    """The values of a JSON array, or of JSON lines, without holding more than a chunk of the file."""
    try:
        size = path.stat().st_size
        with open(path, "rb") as raw:
            file = io.TextIOWrapper(raw, encoding="utf-8-sig")
            yield from _values(path, file, lambda: report(raw.tell(), size) if report else None)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8 ({error.reason} at byte {error.start}). Save it as UTF-8.") from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from None


def _values(path: Path, file: TextIO, tell: Callable[[], None]) -> Iterator[Any]:
    decoder, buffer, start, count, want = json.JSONDecoder(), file.read(_CHUNK).lstrip(), 0, 0, _CHUNK
    if array := buffer.startswith("["):
        start = 1
    while True:
        while start < len(buffer) and buffer[start] in " \t\r\n,":
            start += 1
        if array and buffer[start : start + 1] == "]":
            return
        try:
            value, end = decoder.raw_decode(buffer, start)
            # A number at the end of what was read may go on; other values end where they end.
            whole = end < len(buffer) or isinstance(value, dict | list | str)
            failure: Exception | None = None
        except (ValueError, RecursionError) as error:
            whole, failure = False, error
        if whole:
            yield value
            start, count, want = end, count + 1, _CHUNK
            continue
        tell()
        more = file.read(want)
        if not more and start >= len(buffer) and not array:
            return
        if not more:
            why = failure or "it ends in the middle"
            raise DataError(f"{path}: is no whole JSON after {count} entries ({why}). Correct or copy it again.")
        buffer, start, want = buffer[start:] + more, 0, 2 * want  # doubled: a long entry costs no quadratic time
