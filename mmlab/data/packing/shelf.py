"""Writing shards that can be gone on with: tar members in order, a journal of what is certainly on the disk.

A shard is written as `.train-000003.tar.part` and renamed when it is whole. The journal's notes say how much of each
open shard is on the disk; going on cuts it back to that and writes from there, so a pack killed at any moment ends
with the bytes of one that was not.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO

from mmlab.errors import DataError

JOURNAL = ".pack.jsonl"
_END = bytes(2 * tarfile.BLOCKSIZE)


@dataclass(frozen=True)
class Shard:
    """A finished shard, as the manifest names it."""

    name: str
    split: str
    samples: int
    bytes: int
    sha256: str


def _padded(size: int) -> int:
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


def _header(name: str, size: int) -> bytes:
    """A tar header with a fixed time, owner and mode: the same samples are the same bytes."""
    info = tarfile.TarInfo(name)
    info.size, info.mtime, info.mode = size, 0, 0o644
    return info.tobuf(tarfile.USTAR_FORMAT)


class Shelf:
    """The shards of one split. `at` is what the journal notes: [number of the open shard, its samples, its bytes]."""

    def __init__(self, folder: Path, split: str, most_samples: int, most_bytes: float) -> None:
        self.folder, self.split = folder, split
        self.most_samples, self.most_bytes = most_samples, most_bytes
        self.number = self.samples = self.size = 0
        self._file: BinaryIO | None = None
        self._hash = hashlib.sha256()

    def path(self, number: int, part: bool = False) -> Path:
        """Where a shard is, or is being written."""
        name = f"{self.split}-{number:06d}.tar"
        return self.folder / (f".{name}.part" if part else name)

    @property
    def at(self) -> list[int]:
        """[number of the open shard, its samples, its bytes]."""
        return [self.number, self.samples, self.size]

    def add(self, key: str, members: Sequence[tuple[str, bytes]]) -> Shard | None:
        """Write a sample; returns the shard that was full and is finished now, if one was."""
        needed = sum(tarfile.BLOCKSIZE + _padded(len(data)) for _, data in members)
        full = self.samples >= self.most_samples or self.size + needed + len(_END) > self.most_bytes
        finished = self.finish() if self.samples and full else None
        for extension, data in members:
            self._write(_header(f"{key}.{extension}", len(data)))
            self._write(data)
            self._write(bytes(_padded(len(data)) - len(data)))
        self.samples += 1
        return finished

    def _write(self, data: bytes) -> None:
        if self._file is None:
            self._file = open(self.path(self.number, part=True), "wb")  # noqa: SIM115
        self._file.write(data)
        self._hash.update(data)
        self.size += len(data)

    def finish(self) -> Shard | None:
        """End the open shard (None without one) and give it its name."""
        if not self.samples or self._file is None:
            return None
        self._write(_END)
        self.sync()
        self._file.close()
        path = self.path(self.number)
        os.rename(self.path(self.number, part=True), path)
        shard = Shard(path.name, self.split, self.samples, self.size, self._hash.hexdigest())
        self.number, self.samples, self.size = self.number + 1, 0, 0
        self._file, self._hash = None, hashlib.sha256()
        return shard

    def sync(self) -> None:
        """Wait until what was written is on the disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def go_on(self, number: int, samples: int, size: int) -> None:
        """Cut back to a note of the journal. DataError when less is on the disk than was noted."""
        for path in sorted(self.folder.iterdir()):
            name = path.name.removeprefix(".").removesuffix(".part")
            if name.startswith(f"{self.split}-") and name > self.path(number).name:
                path.unlink()
        part, whole = self.path(number, part=True), self.path(number)
        if not samples:
            part.unlink(missing_ok=True)
            whole.unlink(missing_ok=True)
        else:
            if whole.exists() and not part.exists():  # killed after it was finished, before that was noted
                os.rename(whole, part)
            if not part.exists() or part.stat().st_size < size:
                raise DataError(f"{part}: less is there than was written. Remove {self.folder} and pack again.")
            os.truncate(part, size)
            self._file = open(part, "rb+")  # noqa: SIM115
            self._hash = hashlib.file_digest(self._file, "sha256")
            self._file.seek(0, os.SEEK_END)
        self.number, self.samples, self.size = number, samples, size

    def close(self) -> None:
        """Close the open shard as it is; it can be gone on with."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk: what was not noted is written again
                self._file.close()
            self._file = None


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all; what a kill leaves of it is written over by the next attempt. OSError."""
    part = path.with_name(f".{path.name}.part")
    part.write_bytes(data)
    os.replace(part, path)


class Journal:
    """Lines of JSON: first what is packed, then a note each time that all until then is on the disk."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / JOURNAL
        self._file: FileIO | None = None

    def read(self) -> list[dict[str, Any]]:
        """All whole lines; none where there is no journal. A line that was cut short is dropped, in the file too."""
        try:
            raw = self.path.read_bytes()
        except FileNotFoundError:
            return []
        whole = raw[: raw.rfind(b"\n") + 1]
        if len(whole) < len(raw):
            os.truncate(self.path, len(whole))
        try:
            return [json.loads(line) for line in whole.splitlines()]
        except ValueError:
            raise DataError(f"{self.path}: is damaged. Remove the folder {self.path.parent} and pack again.") from None

    def note(self, line: dict[str, Any]) -> None:
        """Add a line, and wait until it is on the disk."""
        if self._file is None:
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
        line_bytes = json.dumps(line).encode() + b"\n"
        if self._file.write(line_bytes) < len(line_bytes):  # what is cut short is dropped by `read`
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
