"""torch's writers and readers of checkpoints, at any location, with a checksum of every file that is written."""

from __future__ import annotations

import contextlib
import hashlib
import io
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter
from torch.distributed.checkpoint.filesystem import FileSystemBase

from mmlab.messages.locations import Location
from mmlab.train.checkpoint.exchange import GivenUp

METADATA = ".metadata"
"""torch's table of which tensor lies where."""


class _Noted(io.RawIOBase):
    """A stream that is written through, with its size and checksum."""

    def __init__(self, under: Any, first: Callable[[], None], failed: Callable[[OSError], None]) -> None:
        self.under, self._first, self._failed = under, first, failed
        self.size, self.digest = 0, hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        first, count = self.size == 0, memoryview(data).nbytes
        try:
            self.under.write(data)
        except OSError as error:
            self._failed(error)
            raise
        self.digest.update(data)
        self.size += count
        if first:
            self._first()
        return count

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        if not self.under.closed:
            self.under.flush()

    def fileno(self) -> int:
        return int(self.under.fileno())

    def close(self) -> None:
        self.under.close()


class NotedFiles(FileSystemBase):
    """A file system of torch's writers that notes what is written: `files[name] = {"size", "sha256"}`.

    Nothing more is opened once `stop` is set: a thread that was left behind does not write into a later save.
    """

    def __init__(self, under: Any, stop: threading.Event, begun: Callable[[], None]) -> None:
        self.under, self.stop, self.begun = under, stop, begun
        self.files: dict[str, dict[str, Any]] = {}
        self.problem: OSError | None = None
        """What kept a file from being written: torch's serializer says only that a position is not the expected one."""

    def _failed(self, error: OSError) -> None:
        self.problem = self.problem or error

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        """A file; `begun` is called after the first bytes of one that is written."""
        if "w" not in mode:
            with self.under.create_stream(path, mode) as stream:
                yield stream
            return
        if self.stop.is_set():
            raise GivenUp
        with self.under.create_stream(path, mode) as stream:
            noted = _Noted(stream, self.begun, self._failed)
            yield noted
        self.files[_last(path)] = {"size": noted.size, "sha256": noted.digest.hexdigest()}

    def concat_path(self, path: Any, suffix: str) -> Any:
        """A file's path in a folder."""
        return self.under.concat_path(path, suffix)

    def rename(self, path: Any, new_path: Any) -> None:
        """Give a file another name."""
        self.under.rename(path, new_path)
        if _last(path) in self.files:
            self.files[_last(new_path)] = self.files.pop(_last(path))

    def init_path(self, path: Any) -> Any:
        """A path as this file system has it."""
        return self.under.init_path(path)

    def mkdir(self, path: Any) -> None:
        """Make a folder."""
        self.under.mkdir(path)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whatever is below decides."""
        return True

    def exists(self, path: Any) -> bool:
        """Whether there is a file or folder."""
        return bool(self.under.exists(path))

    def rm_file(self, path: Any) -> None:
        """Remove a file."""
        self.under.rm_file(path)


def _last(path: Any) -> str:
    return str(path).rpartition("/")[2]


def writer(folder: Location, stop: threading.Event, begun: Callable[[], None]) -> tuple[FileSystemWriter, NotedFiles]:
    """torch's writer into a folder, and what it writes through. `per_thread_copy_ahead` is for copies from a GPU: what
    is written here lies in host memory."""
    made: Any
    if folder.local is not None:
        made = FileSystemWriter(folder.local, per_thread_copy_ahead=0)
    else:  # nothing to flush: a file is there once it is closed
        made = FsspecWriter(folder.address, sync_files=False, per_thread_copy_ahead=0)
    made.fs = NotedFiles(made.fs, stop, begun)
    return made, made.fs


def reader(folder: Location) -> FileSystemReader:
    """torch's reader of a folder."""
    return FileSystemReader(folder.local) if folder.local is not None else FsspecReader(folder.address)
