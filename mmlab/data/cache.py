"""The data cache, and making a file or folder once although several processes want it."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from mmlab.errors import DataError


def cache_folder() -> Path:
    """Where built-in sets and the indexes of read-only shards live: `MMLAB_DATA`, else ~/.cache/mmlab/data."""
    return Path(os.environ.get("MMLAB_DATA") or Path.home() / ".cache" / "mmlab" / "data")


def short_hash(text: str) -> str:
    """16 hex digits of a text's SHA-256."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextlib.contextmanager
def exclusive(what: Path) -> Iterator[None]:
    """Hold the lock that stands for making `what`; other processes of this host wait.

    The lock is a file in the system's temporary folder, not beside `what`, which may be read-only. Processes of other
    hosts are not held off: whatever is made must appear by an atomic rename.
    """
    folder = Path(tempfile.gettempdir()) / f"mmlab-locks-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        lock = open(folder / f"{short_hash(str(what.absolute()))}.lock", "w")  # noqa: SIM115
    except OSError as error:
        raise DataError(f"the lock folder {folder} cannot be written ({error.strerror}); set TMPDIR.") from None
    with lock as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield  # closing the file releases the lock, also when this process is killed


def make_folder_once(folder: Path, build: Callable[[Path], None]) -> Path:
    """Return `folder`, first made by `build(temporary folder)` if it is not there. Whole or absent, made by one."""
    with exclusive(folder):
        if not folder.exists():
            make_folder(folder, build)
    return folder


def make_folder(folder: Path, build: Callable[[Path], None]) -> None:
    """Make a folder by `build(temporary folder beside it)` and a rename. DataError when it is there and not empty."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder} exists and is not empty: name another folder, or remove it first.")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise DataError(f"Cannot write {folder}: {error.strerror}. Name a folder that you may write.") from None
    try:
        build(temporary)
        temporary.chmod(0o755)
        os.replace(temporary, folder)
    except OSError as error:
        raise DataError(f"Cannot make {folder}: {error}. Name a folder that you may write, with room on it.") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def place_beside(path: Path, name: str) -> list[Path]:
    """Where a file made from `path` may be: beside it, or in the cache if its folder cannot be written."""
    return [path.parent / name, cache_folder() / "beside" / short_hash(str(path.parent.absolute())) / name]


def write_beside(places: list[Path], data: bytes) -> Path:
    """Write to the first place that can be written, atomically; DataError when there is none."""
    failure: OSError | None = None
    for place in places:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(prefix=f".{place.name}.", dir=place.parent)
        except OSError as error:
            failure = error
            continue
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
            os.chmod(temporary, 0o644)
            os.replace(temporary, place)
            return place
        except OSError as error:
            failure = error
        finally:
            Path(temporary).unlink(missing_ok=True)
    tried = ", ".join(str(place.parent) for place in places)
    raise DataError(f"Cannot write {places[0].name} in any of {tried}: {failure}. Set MMLAB_DATA to a writable folder.")
