"""From a record to the files of a sample: pictures read, checked and resized, the text checked. Runs in processes."""

from __future__ import annotations

import hashlib
import io
import json
import os
import stat
import warnings
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageOps

from mmlab.data.decode import on_its_side, to_rgb
from mmlab.data.format import parse_json
from mmlab.data.packing.options import PackOptions, Prepared, Record, shown
from mmlab.data.tiling import Tiling
from mmlab.errors import DataError

_EXTENSIONS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp"}
"""Pillow's formats that shards hold as they are (MPO is a JPEG with more pictures after it)."""


def prepare(records: Sequence[Record], images: Path, options: PackOptions) -> list[Prepared]:
    """Each record ready to be written, or with the problem that keeps it out. DataError only when a disk fails."""
    root = os.path.realpath(images)
    return [_prepare(record, images, root, options) for record in records]


def _prepare(record: Record, images: Path, root: str, options: PackOptions) -> Prepared:
    if record.problem:
        return Prepared(record.number, shown(record.origin), problem=record.problem)
    try:
        read = [_read(name, images, root, options.follow_links) for name in record.pictures]
        text = _text(record)
        fitted = [_fit(data, name, options) for data, name in zip(read, record.pictures, strict=True)]
    except _Unfit as error:
        return Prepared(record.number, shown(record.origin), problem=str(error))
    numbered = len(fitted) > 1
    members = [(f"{i}.{ext}" if numbered else ext, data) for i, (ext, data) in enumerate(fitted)]
    said = json.dumps(record.text, sort_keys=True).encode()
    first = hashlib.blake2b(read[0] if read else said, digest_size=8).digest()
    whole = hashlib.blake2b(said, digest_size=8)
    for data in read:
        whole.update(hashlib.blake2b(data, digest_size=16).digest())
    return Prepared(
        record.number,
        shown(record.origin),
        (*members, ("json", text)),
        int.from_bytes(whole.digest(), "big"),
        int.from_bytes(first, "big") / 2**64,
        copied=sum(data is old for (_, data), old in zip(fitted, read, strict=True)),
    )


class _Unfit(Exception):
    """Why a record can be no sample."""


def _read(name: str | bytes, images: Path, root: str, follow_links: bool) -> bytes:
    """The bytes of a picture. Only regular files under the folder of pictures: captions of others may name any file."""
    if isinstance(name, bytes):
        return name
    if "://" in name:
        raise _Unfit("is an address, not a file: download it first (img2dataset does)")
    try:
        path = os.path.join(images, name)
        if not os.path.lexists(path) and "\\" in name:  # written on Windows
            path = os.path.join(images, name.replace("\\", "/"))
        inside = os.path.realpath(path) if not follow_links else os.path.abspath(path)
        top = root if not follow_links else os.path.abspath(images)
        if os.path.commonpath([inside, top]) != top:
            link = "" if follow_links or os.path.normpath(path) == inside else " (through a link: --follow-links)"
            raise _Unfit(f"{shown(name)} lies outside of {images}{link}; --images names a folder that holds all")
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise _Unfit(f"{shown(name)} is no regular file")
        with open(path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        raise _Unfit(f"{shown(name)} does not exist in {images}") from None
    except OSError as error:
        raise _Unfit(f"{shown(name)} cannot be read ({error.strerror})") from None
    except ValueError as error:  # a NUL in the name
        raise _Unfit(f"{name!r} is no name of a file ({error})") from None


def _text(record: Record) -> bytes:
    """The sample's json, once training's own reading takes it."""
    names = [shown(name) for name in record.pictures if isinstance(name, str)]
    value = {**record.text, "origin": shown(record.origin)} | ({"pictures": names} if names else {})
    try:
        raw = json.dumps(value, ensure_ascii=False, sort_keys=True).encode()
        if parse_json(raw, len(record.pictures), "text") is None:
            raise _Unfit("has neither a conversation nor a caption")
    except UnicodeEncodeError:
        raise _Unfit("its text holds half a surrogate pair, which is no UTF-8") from None
    except DataError as error:
        raise _Unfit(str(error).removeprefix("text: ")) from None
    return raw


def _fit(data: bytes, name: str | bytes, options: PackOptions) -> tuple[str, bytes]:
    """(extension, bytes) of a picture: as it is where it is small enough and of a format that shards hold."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # large pictures and odd metadata are no reason to speak up
            with Image.open(io.BytesIO(data)) as image:
                turned = on_its_side(image)
                target = _target(image.size[::-1] if turned else image.size, options.resize, options.tiles)
                kind = _EXTENSIONS.get(image.format or "", "")
                if target is None and kind:
                    image.draft(None, (1, 1))  # it is decoded only to see that it can be
                    image.load()
                    return kind, data
                if target is not None:
                    image.draft(None, target[::-1] if turned else target)
                image.load()
                return _encode(ImageOps.exif_transpose(image), target, options.quality)
    except Exception as error:  # decoders raise all kinds on damaged bytes
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
        where = f"{shown(name)} " if isinstance(name, str) else ""
        raise _Unfit(f"{where}cannot be decoded ({reason})") from None


def _target(size: tuple[int, int], tile: int, tiles: int) -> tuple[int, int] | None:
    """The smallest size of the same shape that covers the grid that training would cut a picture into (one tile: the
    shorter side has `tile` pixels); None where that would not make it smaller."""
    if not tile:
        return None
    grid = Tiling(tile, tokens=1, seq_len=1, max_tiles=tiles).grid(*size)
    least = (grid.columns * tile, grid.rows * tile)
    scale = max(least[0] / size[0], least[1] / size[1])
    return None if scale >= 1 else (max(least[0], round(size[0] * scale)), max(least[1], round(size[1] * scale)))


def _encode(image: Image.Image, target: tuple[int, int] | None, quality: int) -> tuple[str, bytes]:
    """JPEG where it is made smaller; PNG where it has transparency, or only its format had to change."""
    clear = image.has_transparency_data
    result = image.convert("RGBA") if clear else to_rgb(image)
    if target is not None:
        result = result.resize(target, Image.Resampling.BICUBIC)
    buffer = io.BytesIO()
    if clear or target is None:
        result.save(buffer, format="PNG")
        return "png", buffer.getvalue()
    result.save(buffer, format="JPEG", quality=quality)
    return "jpg", buffer.getvalue()
