"""From the plan's words to addresses in the cache, and the small files that lie beside remote shards."""

from __future__ import annotations

import io
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from braceexpand import UnbalancedBracesError, braceexpand  # type: ignore[attr-defined]  # its stub misses one

from mmlab.data.cache import exclusive, short_hash, write_beside
from mmlab.data.remote.blocks import Address, blocks_folder, is_fresh, mark_fresh, remote_root
from mmlab.data.remote.transport import Refused, Store, retried, transport
from mmlab.errors import DataError

_JUST_NOW = 30.0
"""Seconds in which the ranks of a host start: one of them asks for the version of a shard, the others believe it."""
_AT_ONCE = 16
"""Shards that are asked for at once: a thousand of them, with 50 ms each, take 3 s."""
_REMOTE = re.compile(r"pipe:|[A-Za-z][A-Za-z0-9+.-]*://")


def is_remote(pattern: str) -> bool:
    """Whether a pattern names shards by an address or a command."""
    return _REMOTE.match(pattern) is not None


def is_address(path: Path) -> bool:
    """Whether a path is that of a remote shard's address."""
    return path.parent.parent == remote_root()


def shown_name(path: Path) -> str:
    """What a person calls a shard: its address, or its path."""
    return Address.load(path).url if is_address(path) else str(path)


def expand(pattern: str, field_name: str) -> list[Path]:
    """The shards that a remote pattern names (braces; in a store also * and folders), each with its version known.

    DataError naming the field and the address when one cannot be had.
    """
    try:
        urls = list(braceexpand(pattern))
    except UnbalancedBracesError as error:
        raise DataError(f'{field_name} = "{pattern}": {error}. Write it like "train-{{000000..000009}}.tar".') from None
    found: list[str] = []
    for url in urls:
        there = transport(url)
        if isinstance(there, Store) and ("*" in url or not url.endswith(".tar")):
            wanted = url if "*" in url else f"{url.rstrip('/')}/*.tar"
            shards = retried(url, lambda there=there, wanted=wanted: there.glob(wanted))  # type: ignore[misc]
            if not shards:
                raise DataError(f'{field_name} = "{pattern}": nothing matches {wanted}. Check bucket and prefix.')
            found += shards
        else:
            found.append(url)
    try:
        with ThreadPoolExecutor(min(_AT_ONCE, len(found))) as pool:
            return list(pool.map(_locate, found))
    except DataError as error:
        raise DataError(f"{field_name}: {error}") from None


def _split(url: str) -> tuple[str, str]:
    """(the folder's address, the shard's name) of an address or a command."""
    if url.startswith("pipe:"):
        last = url.rpartition("/")[2]
        named = re.fullmatch(r"[\w.-]+\.tar", last) is not None
        return url.removesuffix(last) if named else url, last if named else "shard.tar"
    plain = url.partition("?")[0]
    folder, _, name = plain.rpartition("/")
    return folder + url.removeprefix(plain), name or "shard.tar"


def _locate(url: str) -> Path:
    """The path of a shard's address, of the version that is on the server now."""
    folder, name = _split(url)
    path = remote_root() / short_hash(folder) / name
    blocks = blocks_folder(path)
    with exclusive(path):
        old = Address.load(path) if path.exists() else None
        if old and (is_fresh(blocks, _JUST_NOW) or url.startswith("pipe:")):
            return path
        there = transport(url)
        about = retried(url, lambda: there.about(url))
        new = Address(url, about.size, about.tag, about.ranged)
        if new != old:
            shutil.rmtree(blocks, ignore_errors=True)  # blocks of another version
            new.save(path)
        mark_fresh(blocks)
    return path


def beside(path: Path, name: str) -> Path | None:
    """A small file that lies beside a remote shard, fetched; None where there is none (or for a pipe)."""
    folder = _split(Address.load(path).url)[0]
    return _fetch_small(folder, name)


def join(folder: str, name: str) -> str:
    """The address of a file in a folder; a query (such as a signature) stays at the end."""
    plain, mark, query = folder.partition("?")
    return f"{plain.rstrip('/')}/{name}{mark}{query}"


def remote_folder(url: str) -> Path | None:
    """The local folder that stands for a remote folder of a packed set, with its dataset.json; None where `url` names
    shards, or the folder has none."""
    if url.startswith("pipe:") or url.partition("?")[0].endswith(".tar") or "*" in url or "{" in url:
        return None
    found = _fetch_small(url.rstrip("/"), "dataset.json")
    return found.parent if found else None


def _fetch_small(folder: str, name: str) -> Path | None:
    if folder.startswith("pipe:"):
        return None
    url = join(folder, name)
    path = remote_root() / short_hash(folder) / name
    fresh = path.with_name(f"{name}.blocks")
    with exclusive(path):
        if not is_fresh(fresh, _JUST_NOW):
            there = transport(url)

            def fetched() -> bytes:
                into = io.BytesIO()
                there.download(url, into, there.about(url))
                return into.getvalue()

            try:
                write_beside([path], retried(url, fetched))
            except Refused:  # S3 does not say whether a file is missing or not for us
                path.unlink(missing_ok=True)
            mark_fresh(fresh)
    return path if path.exists() else None
