"""The cache of remote shards: blocks (or whole shards) on the disk, shared by all processes of the host."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, NoReturn, TypeVar

from mmlab.data.cache import cache_folder, exclusive, write_beside
from mmlab.data.remote.transport import About, Changed, Store, retried, transport
from mmlab.errors import DataError

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

BLOCK = 4 << 20
"""Bytes of a block. A request costs some 50 ms of latency, in which 4 MB come at 80 MB/s; a chunk of 256 neighbouring
samples of 100 KB is six blocks, so little is fetched that is not used soon."""
RECHECK = 60.0
"""Seconds after which a store is asked again whether a shard is still the same (HTTP says so with each block)."""
_AT_ONCE = 4
"""Blocks fetched at once when a whole shard is read."""
_LOOK_EVERY = 2.0
"""Seconds between looks at the size of the cache."""
_DEFAULT_LIMIT = 20_000
T = TypeVar("T")


@dataclass(frozen=True)
class Address:
    """Where a remote shard is and which version of it: the content of its path."""

    url: str
    size: int | None
    tag: str
    ranged: bool

    @classmethod
    def load(cls, path: Path) -> Address:
        """DataError when the file is gone or damaged."""
        try:
            return cls(**json.loads(path.read_bytes()))
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"{path}: cannot be read ({error}). Start the run again: it is made anew.") from None

    @property
    def about(self) -> About:
        """The version."""
        return About(self.size, self.tag, self.ranged)

    def save(self, path: Path) -> None:
        """Write it; its time of change is what the index of the shard goes by."""
        write_beside([path], json.dumps(asdict(self)).encode())


def remote_root() -> Path:
    """The folder of all addresses and blocks."""
    return cache_folder() / "remote"


def set_limit(megabytes: int) -> None:
    """How much of the disk the blocks of all remote shards of this host may take; the latest call counts."""
    path = remote_root() / "limit"
    if not path.exists() or path.read_text() != str(megabytes):
        write_beside([path], str(megabytes).encode())


def blocks_folder(path: Path) -> Path:
    """Where the blocks of a shard are."""
    return path.with_name(path.name + ".blocks")


def _limit() -> int:
    try:
        return int((remote_root() / "limit").read_text()) * 1_000_000
    except (OSError, ValueError):
        return _DEFAULT_LIMIT * 1_000_000


def evict(limit: int, keep: Path | None = None) -> None:
    """Remove the blocks not read for longest until all take less than nine tenths of `limit` bytes, if they exceed
    it; never `keep`."""
    with exclusive(remote_root() / "evict"):
        found = []
        for file in remote_root().glob("*/*.blocks/*.data"):
            try:
                stat = file.stat()
                found.append((stat.st_atime_ns, stat.st_size, file))
            except FileNotFoundError:  # removed by its shard's renewal
                continue
        total = sum(size for _, size, _ in found)
        if total <= limit:
            return
        for _, size, file in sorted(found):
            if total <= 0.9 * limit:
                break
            if file != keep:
                file.unlink(missing_ok=True)
                total -= size


class RemoteShard:
    """Reads a remote shard by offset, through the cache. Safe to use from several threads and processes."""

    def __init__(self, path: Path) -> None:
        self.path, self.address = path, Address.load(path)
        self.folder = blocks_folder(path)

    @property
    def size(self) -> int:
        """Bytes; a shard that cannot be read in parts is fetched for it."""
        if self.address.ranged and self.address.size is not None:
            return self.address.size
        return self._from_whole(lambda file: os.fstat(file).st_size)

    def read(self, offset: int, size: int) -> bytes:
        """`size` bytes at `offset`, fewer at the end. DataError, naming the address, when they cannot be had."""
        if not self.address.ranged:
            return self._from_whole(lambda file: os.pread(file, size, offset))
        end = min(offset + size, self.size)
        pieces = []
        while offset < end:
            number, start = divmod(offset, BLOCK)
            pieces.append(self._block(number, start, min(BLOCK, start + end - offset)))
            offset += BLOCK - start
        return b"".join(pieces)

    def bring(self, offset: int, size: int) -> None:
        """Have what lies there in the cache."""
        if not self.address.ranged:
            self._from_whole(lambda file: None)
            return
        for number in range(offset // BLOCK, -(-min(offset + size, self.size) // BLOCK)):
            if not self._path(number).exists():
                self._fetch_block(number)

    def fetch(self) -> None:
        """Bring all of the shard into the cache, several blocks at once, where it fits."""
        if self.address.ranged and self.size <= _limit() // 2:
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                list(pool.map(lambda number: self.bring(number * BLOCK, 1), range(-(-self.size // BLOCK))))

    # -- in blocks

    def _block(self, number: int, start: int, end: int) -> bytes:
        """Bytes `start` to `end` of a block, from the disk or from afar."""
        try:
            return _read(self._path(number), lambda file: os.pread(file, end - start, start))
        except FileNotFoundError:
            return self._fetch_block(number)[start:end]

    def _path(self, number: int) -> Path:
        return self.folder / f"{number:06d}.data"

    def _fetch_block(self, number: int) -> bytes:
        path = self._path(number)
        # One of a few locks a shard: two processes never fetch the same block, and seldom wait for another one.
        with exclusive(self.folder / f"lock-{number % 16}"):
            try:
                return path.read_bytes()
            except FileNotFoundError:
                data = self._get(number * BLOCK, min((number + 1) * BLOCK, self.size))
            try:
                _write(path, lambda into: into.write(data))
            except OSError:  # a full disk: what was fetched is used all the same, and room is made for the next
                evict(_limit() // 2)
                return data
        _look(path)
        return data

    def _get(self, start: int, end: int) -> bytes:
        url, about = self.address.url, self.address.about
        there = transport(url)
        if isinstance(there, Store) and not is_fresh(self.folder, RECHECK):
            if retried(url, lambda: there.about(url)) != about:
                self._changed()
            mark_fresh(self.folder)

        def take() -> bytes:
            data = there.read(url, start, end, about)
            if len(data) != end - start:
                raise ConnectionError(f"{len(data)} bytes came, not {end - start}")
            return data

        try:
            return retried(url, take)
        except Changed:
            self._changed()

    def _changed(self) -> NoReturn:
        raise DataError(
            f"{self.address.url}: was changed on the server while in use. Start the run again: the shard is then "
            "indexed anew."
        )

    # -- whole

    def _from_whole(self, act: Callable[[int], T]) -> T:
        path = self.folder / "whole.data"
        for _ in range(3):  # fetched, and evicted by another process before it was opened: again
            try:
                return _read(path, act)
            except FileNotFoundError:
                self._download(path)
        raise DataError(
            f"{self.address.url}: is evicted from the cache as fast as it is fetched. Raise data.cache_mb above the "
            "size of a few shards: this one cannot be read in parts."
        )

    def _download(self, path: Path) -> None:
        """Bring the whole shard into the cache: whole or absent."""
        url, about = self.address.url, self.address.about
        there = transport(url)

        def fill(into: BinaryIO) -> None:
            there.download(url, into, about)
            if about.size is not None and into.tell() != about.size:
                raise ConnectionError(f"{into.tell()} bytes came, not {about.size}")

        with exclusive(self.folder / "lock"):
            if path.exists():
                return
            try:
                retried(url, lambda: _write(path, fill))
            except Changed:
                self._changed()
            except OSError as error:
                raise DataError(
                    f"{path}: cannot be written ({error.strerror}). Make room, or set MMLAB_DATA to another folder."
                ) from None
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            known = self.folder / "whole.sha256"
            if known.exists() and known.read_text() != digest:
                known.write_text(digest)
                self.address.save(self.path)  # a later time of change: the index is made anew
                self._changed()
            known.write_text(digest)
        _look(path)


class RemoteFile(io.RawIOBase):
    """A remote shard as a file to read from and seek in."""

    def __init__(self, path: Path) -> None:
        self._shard, self._at = RemoteShard(path), 0

    def readable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    def tell(self) -> int:
        """The byte that is read next."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a byte."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at}.get(whence)
        self._at = offset + (self._shard.size if base is None else base)
        return self._at

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Fill the buffer as far as the shard goes."""
        view = memoryview(buffer)
        data = self._shard.read(self._at, len(view))
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


def _read(path: Path, act: Callable[[int], T]) -> T:
    file = os.open(path, os.O_RDONLY)
    try:
        os.utime(file)  # what was read last is evicted last
        return act(file)
    finally:
        os.close(file)


def _write(path: Path, fill: Callable[[BinaryIO], object]) -> None:
    """Make a file, whole or absent. OSError on a full disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".")
    try:
        with open(handle, "wb") as file:
            fill(file)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def is_fresh(folder: Path, seconds: float) -> bool:
    """Whether the version of a shard was looked up within so many seconds, by any process of the host."""
    try:
        return time.time() - (folder / "checked").stat().st_mtime < seconds
    except FileNotFoundError:
        return False


def mark_fresh(folder: Path) -> None:
    """Note that the version was looked up now."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "checked").touch()


def _look(written: Path) -> None:
    """Keep the cache within its limit; looked at no more often than every two seconds, by all processes together."""
    if written.name == "whole.data" or not is_fresh(remote_root(), _LOOK_EVERY):
        mark_fresh(remote_root())
        evict(_limit(), keep=written)
