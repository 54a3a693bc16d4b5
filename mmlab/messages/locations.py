"""Folders, on this machine's file systems or wherever fsspec reaches (`s3://bucket/folder`).

Without torch: whoever lists a run's checkpoints reads them too. Nothing here renames what is elsewhere: object stores
cannot do that in one piece. What counts is a file that is written last.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from mmlab.messages.files import write_atomic

FAILED = "cannot be reached"
"""Said of a location that answers with an error."""


class Location:
    """One folder. Errors of the file system below come as OSError, whatever raised them.

    Args:
        address: a path, or an address with a protocol that fsspec knows.
    """

    def __init__(self, address: str | Path) -> None:
        text = str(address)
        if text.startswith("file://"):
            text = text.removeprefix("file://")
        self.address = text.rstrip("/") if "://" in text else str(Path(text))
        self.local = None if "://" in text else Path(text)
        """The folder's path where it is on this machine's file systems, else None."""

    def __truediv__(self, name: str) -> Location:
        return Location(f"{self.address}/{name}")

    def __str__(self) -> str:
        return self.address

    @property
    def name(self) -> str:
        """The last part of the address."""
        return self.address.rpartition("/")[2]

    @contextlib.contextmanager
    def _elsewhere(self) -> Iterator[tuple[Any, str]]:
        """The file system and the path in it. Libraries raise errors of their own: they become OSError here."""
        try:
            import fsspec

            system, path = fsspec.core.url_to_fs(self.address)
            system.invalidate_cache()  # listings are kept; other processes write here
            yield system, path
        except OSError:
            raise
        except Exception as error:
            raise OSError(f"{self.address} {FAILED}: {type(error).__name__}: {error}") from None

    def make(self) -> None:
        """Make the folder and those above it."""
        if self.local is not None:
            self.local.mkdir(parents=True, exist_ok=True)
            return
        with self._elsewhere() as (system, path):
            system.makedirs(path, exist_ok=True)

    def folders(self) -> list[Location]:
        """The folders in this one; none where it does not exist."""
        if self.local is not None:
            return [self / p.name for p in sorted(self.local.iterdir()) if p.is_dir()] if self.local.is_dir() else []
        with self._elsewhere() as (system, path):
            try:
                found = system.ls(path, detail=True)
            except FileNotFoundError:
                return []
            names = sorted(e["name"].rstrip("/").rpartition("/")[2] for e in found if e["type"] == "directory")
            return [self / name for name in names]

    def sizes(self) -> dict[str, int]:
        """Bytes of each file in this folder; none where it does not exist."""
        if self.local is not None:
            files = self.local.iterdir() if self.local.is_dir() else ()
            return {p.name: p.stat().st_size for p in files if p.is_file()}
        with self._elsewhere() as (system, path):
            try:
                found = system.ls(path, detail=True)
            except FileNotFoundError:
                return {}
            return {e["name"].rpartition("/")[2]: int(e["size"] or 0) for e in found if e["type"] == "file"}

    def exists(self) -> bool:
        """Whether there is anything."""
        if self.local is not None:
            return self.local.exists()
        with self._elsewhere() as (system, path):
            return bool(system.exists(path))

    def read(self, name: str) -> bytes:
        """The content of a file in this folder."""
        if self.local is not None:
            return (self.local / name).read_bytes()
        with self._elsewhere() as (system, path):
            return bytes(system.cat_file(f"{path}/{name}"))

    def write(self, name: str, data: bytes) -> None:
        """Write a file that is whole or absent (an object store shows what was put in one request)."""
        if self.local is not None:
            write_atomic(self.local / name, data)
            return
        with self._elsewhere() as (system, path):
            system.pipe_file(f"{path}/{name}", data)

    def put(self, file: Path) -> None:
        """Copy a file of this machine into this folder, which is elsewhere, under its own name."""
        with self._elsewhere() as (system, path):
            system.put_file(str(file), f"{path}/{file.name}")

    def take(self, name: str, source: Location) -> None:
        """Copy a file of another folder into this one. Within one file system as a second name of the same bytes, so
        that it costs no room: files of checkpoints are replaced, never changed."""
        if self.local is not None and source.local is not None:
            try:
                os.link(source.local / name, self.local / name)
            except FileNotFoundError:
                raise
            except OSError:  # another file system, or one without such links
                shutil.copyfile(source.local / name, self.local / name)
        elif source.local is not None:
            self.put(source.local / name)
        else:
            with tempfile.TemporaryDirectory() as folder:
                target = Path(folder) / name if self.local is None else self.local / name
                with source.open(name) as stream, open(target, "wb") as file:
                    shutil.copyfileobj(stream, file, 1 << 20)
                if self.local is None:
                    self.put(target)

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """A file of this folder, for reading."""
        if self.local is not None:
            with open(self.local / name, "rb") as file:
                yield file
            return
        with self._elsewhere() as (system, path), system.open(f"{path}/{name}", "rb") as file:
            yield file

    def checksum(self, name: str) -> str:
        """SHA-256 of a file, hexadecimal."""
        with self.open(name) as file:
            digest = hashlib.sha256()
            while block := file.read(1 << 20):
                digest.update(block)
        return digest.hexdigest()

    def remove(self, first: str = "") -> None:
        """Remove the folder and all that is in it; `first` names the file that goes before the others."""
        if self.local is not None:
            if first:
                (self.local / first).unlink(missing_ok=True)
            shutil.rmtree(self.local)
            return
        with self._elsewhere() as (system, path):
            if first and system.exists(f"{path}/{first}"):
                system.rm_file(f"{path}/{first}")
            system.rm(path, recursive=True)

    def room(self) -> int | None:
        """Free bytes where the folder is to be; None where nobody can say."""
        if self.local is None:
            return None
        return shutil.disk_usage(next(p for p in (self.local, *self.local.parents) if p.exists())).free
