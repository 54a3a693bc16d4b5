"""Shards: tar files in WebDataset form, found by folder or brace pattern, scanned once and read by offset.

A sample is the members of a tar that share a key (the name up to the first dot of its last part, WebDataset's rule)
and stand next to each other: pictures (jpg, jpeg, png, webp; several are taken in the order of their names) and text
(txt or json).
"""

from __future__ import annotations

import glob
import io
import os
import tarfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from braceexpand import UnbalancedBracesError, braceexpand  # type: ignore[attr-defined]  # its stub misses one

from mmlab.data.remote import RemoteFile, RemoteShard, expand, is_address, is_remote, shown_name
from mmlab.errors import DataError

IMAGE_EXTENSIONS = ("jpg", "jpeg", "png", "webp")
TEXT_EXTENSIONS = ("txt", "json")


@dataclass(frozen=True)
class Member:
    """A file inside a tar: extension (lower case, after the key), byte offset of its data, size in bytes."""

    extension: str
    offset: int
    size: int


@dataclass
class ScannedSample:
    """The members of one sample."""

    key: str
    images: list[Member] = field(default_factory=list)
    texts: dict[str, Member] = field(default_factory=dict)


def expand_shards(pattern: str, field_name: str = "data.path") -> list[Path]:
    """Shards that a folder (all its *.tar, sorted) or a brace / glob pattern names. DataError when there are none.

    Remote ones come as the paths of their addresses (`mmlab.data.remote`). `field_name` is the plan's key that is named
    in the message.
    """
    if is_remote(pattern):
        return expand(pattern, field_name)
    folder = Path(pattern)
    if folder.is_dir():
        shards = sorted(folder.glob("*.tar"))
        if not shards:
            raise DataError(f'{field_name} = "{pattern}": no *.tar in this folder. Name a folder of WebDataset shards.')
        return shards
    try:
        names = list(braceexpand(pattern))
    except UnbalancedBracesError as error:
        raise DataError(f'{field_name} = "{pattern}": {error}. Write it like "train-{{000000..000009}}.tar".') from None
    shards = []
    for name in names:
        found = [Path(p) for p in sorted(glob.glob(name))] if glob.has_magic(name) else [Path(name)]
        missing = [p for p in found if not p.is_file()]
        if not found or missing:
            what = "nothing matches" if not found else f"{missing[0]} does not exist"
            raise DataError(
                f'{field_name} = "{pattern}": {what}. Name a folder of *.tar shards, a brace pattern such as '
                '"shards/train-{000000..000009}.tar", or a built-in set (emoji, shapes).'
            )
        shards += found
    return shards


def _key_and_extension(name: str) -> tuple[str, str]:
    """WebDataset's split of a member's name: key up to the first dot of the last part, extension after it."""
    folder, _, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    return (f"{folder}/{stem}" if folder else stem), extension.lower()


def open_shard(path: Path) -> io.BufferedReader:
    """A shard as a file, wherever it is. A remote one that is read from end to end is fetched for it."""
    if not is_address(path):
        return open(path, "rb")
    RemoteShard(path).fetch()
    return io.BufferedReader(RemoteFile(path))


def _members(path: Path) -> Iterator[tuple[str, Member]]:
    """(key, member) of each file in a tar that can be part of a sample."""
    with open_shard(path) as file:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for info in tar:
                base = info.name.rpartition("/")[2]
                if info.isfile() and not base.startswith((".", "__")):
                    key, extension = _key_and_extension(info.name)
                    yield key, Member(extension, info.offset_data, info.size)
            end = tar.offset  # where the end-of-archive mark has to stand: tarfile also stops where the file just ends
        file.seek(end)
        if file.read(512) != bytes(512):
            raise tarfile.ReadError("the end-of-archive mark is missing")


def scan_shard(path: Path) -> list[ScannedSample]:
    """All samples of a shard, without reading their contents. DataError on a damaged, compressed or empty shard."""
    samples: list[ScannedSample] = []
    latest: dict[str, tuple[ScannedSample, set[str]]] = {}
    try:
        for key, member in _members(path):
            # Members of a sample need not be neighbours (`tar -cf shard.tar folder` stores them in any order); a member
            # that comes again under its key begins another sample (shards that were concatenated).
            sample, seen = latest.get(key, (None, set()))
            if sample is None or member.extension in seen:
                sample, seen = ScannedSample(key), set()
                samples.append(sample)
                latest[key] = sample, seen
            seen.add(member.extension)
            kind = member.extension.rpartition(".")[2]
            if kind in IMAGE_EXTENSIONS:
                sample.images.append(member)
            elif kind in TEXT_EXTENSIONS:
                sample.texts.setdefault(kind, member)
    except tarfile.TarError as error:
        raise DataError(_damage(path, samples, error)) from None
    except OSError as error:
        raise DataError(f"{shown_name(path)}: cannot be read ({error.strerror}).") from None
    for sample in samples:
        sample.images.sort(key=lambda member: _natural(member.extension))
    samples = [sample for sample in samples if sample.images or sample.texts]
    if not samples:
        raise DataError(
            f"{shown_name(path)}: no samples in this shard. It needs pictures (jpg, png, webp) or texts (txt, json) "
            "under a common key, such as 000001.jpg and 000001.txt; remove the shard if it is empty on purpose."
        )
    return samples


def _natural(extension: str) -> tuple[int, str]:
    """Sorts "2.jpg" before "10.jpg"."""
    number = extension.partition(".")[0]
    return (int(number) if number.isdigit() else 0), extension


def _damage(path: Path, samples: Sequence[ScannedSample], error: tarfile.TarError) -> str:
    with open_shard(path) as file:
        magic = file.read(4)
    name = shown_name(path)
    if magic[:2] == b"\x1f\x8b" or magic[:3] == b"BZh" or magic == b"\xfd7zX" or magic == b"\x28\xb5\x2f\xfd":
        return f"{name}: is compressed, samples are read by their offset. Unpack the shard (for example gunzip) first."
    if not samples:
        return f"{name}: is no tar file, or cut short before its first sample ({error}). Make or copy it again."
    whole = f'the last whole sample is "{samples[-2].key}"' if len(samples) > 1 else "no sample is whole"
    return (
        f"{name}: is cut short or damaged ({error}); {whole}, {len(samples) - 1} in all. Make or copy the shard again."
    )


class ShardFiles:
    """Open shards, read by offset; safe to use from several threads. Not picklable: each process opens its own.

    The `MOST_OPEN` shards read last stay open: a process may have 1,024 files, a data set has thousands of shards.
    """

    MOST_OPEN = 128
    MOST_AT_ONCE = 16

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = list(paths)
        self._handles: dict[int, int] = {}
        self._remote = {i: RemoteShard(path) for i, path in enumerate(self.paths) if is_address(path)}
        self._lock = threading.Lock()

    def prepare(self, places: Iterable[tuple[int, int, int]]) -> None:
        """Bring what lies at (shard, offset, size) of remote shards into the cache, all at once: it will be read soon.

        A batch comes from as many chunks as there are lanes; one after the other, each would cost a round trip.
        """
        remote = [place for place in places if place[0] in self._remote] if self._remote else []
        if remote:
            with ThreadPoolExecutor(min(self.MOST_AT_ONCE, len(remote))) as pool:
                list(pool.map(lambda place: self._remote[place[0]].bring(*place[1:]), remote))

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """`size` bytes at `offset` of a shard; DataError when the file is gone or shorter than that."""
        if shard in self._remote:
            return self._whole(shard, self._remote[shard].read(offset, size), size)
        try:
            with self._lock:  # held while reading, so that no other thread closes the file meanwhile
                handle = self._handles.pop(shard, None)
                if handle is None:
                    while len(self._handles) >= self.MOST_OPEN:
                        os.close(self._handles.pop(next(iter(self._handles))))
                    handle = os.open(self.paths[shard], os.O_RDONLY)
                self._handles[shard] = handle  # last in order: the first is the one not read for longest
                data = os.pread(handle, size, offset)
        except OSError as error:
            raise DataError(f"{self.paths[shard]}: cannot be read ({error.strerror}).") from None
        return self._whole(shard, data, size)

    def _whole(self, shard: int, data: bytes, size: int) -> bytes:
        if len(data) < size:
            name = shown_name(self.paths[shard])
            raise DataError(f"{name}: became shorter while in use. Make or copy the shard again.")
        return data

    def close(self) -> None:
        """Close all files; a later read opens them again."""
        with self._lock:
            for handle in self._handles.values():
                os.close(handle)
            self._handles.clear()
