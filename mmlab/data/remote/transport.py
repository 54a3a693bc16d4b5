"""How bytes come from elsewhere: one transport a kind of address, failures retried and told in one sentence."""

from __future__ import annotations

import errno
import importlib
import re
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol, TypeVar

from mmlab.errors import DataError

ATTEMPTS = 5
FIRST_WAIT = 0.5
"""Seconds before the second attempt; doubled each time, so five attempts bridge 7.5 s."""
NO_ANSWER = 30.0
"""Seconds without a byte after which a connection counts as broken."""
_PIECE = 1 << 20
T = TypeVar("T")


@dataclass(frozen=True)
class About:
    """A remote file: its `size` in bytes (None: not known), its version's `tag` (ETag or time; may be empty), and
    whether parts of it can be read (`ranged`)."""

    size: int | None
    tag: str
    ranged: bool


class Changed(Exception):
    """The file is no longer the version that was asked for."""


class Gone(Exception):
    """There is no point in asking again: the file is not there, or not for us. Says why and what to do."""


class Refused(DataError):
    """The far side has no such file, or not for us."""


class Transport(Protocol):
    """What is asked of the far side. All raise `Gone`, or what the library raises and `retried` may try again."""

    def about(self, url: str) -> About:
        """Size and version."""

    def read(self, url: str, start: int, end: int, about: About) -> bytes:
        """Bytes `start` to `end` of that version; `Changed` when it is another one."""

    def download(self, url: str, into: BinaryIO, about: About) -> None:
        """All of it."""


def transport(url: str) -> Transport:
    """The transport for an address. DataError when a package for it is missing, or none knows it."""
    kind = url.partition(":")[0].lower()
    if kind == "pipe":
        return Pipe()
    try:
        fsspec = importlib.import_module("fsspec")
        if kind in ("http", "https"):
            return Http(fsspec.filesystem(kind))
        return Store(fsspec.filesystem(kind))
    except ImportError:
        from mmlab.plan.rules.remote import IN_THE_EXTRA, PACKAGES  # not loaded in a decode process without need

        package = PACKAGES.get(kind)
        how = 'pip install "mmlab[remote]"' if package in IN_THE_EXTRA else f"pip install {package or 'it'}"
        raise DataError(f"{url}: {kind}:// is read by {package or 'a package'}, not installed here. {how}") from None
    except ValueError:
        raise DataError(f"{url}: {kind}:// is no protocol that fsspec knows. Use https://, s3:// or pipe:.") from None


def retried(url: str, act: Callable[[], T]) -> T:
    """`act()`, tried again with doubled waits when a connection breaks. DataError naming the address in the end."""
    wait = FIRST_WAIT
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return act()
        except (DataError, Changed):
            raise
        except Gone as error:
            raise Refused(f"{url}: {error}") from None
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise  # this side's disk
            failure: Exception = error
        except Exception as error:  # each library has its own kinds for a connection that breaks
            failure = error
        if attempt == ATTEMPTS or not _may_pass(failure):
            said = f"{type(failure).__name__}: {failure}".splitlines()[0][:200].rstrip(": ")
            times = f", {attempt} times" if attempt > 1 else ""
            raise DataError(f"{url}: cannot be read ({said}{times}). Check the address and the network.") from None
        time.sleep(wait)
        wait *= 2
    raise AssertionError  # the last attempt returns or raises


def _may_pass(error: Exception) -> bool:
    """Whether a later attempt may do better: not where credentials or parameters are wrong."""
    return not isinstance(error, TypeError | ValueError) and "Credentials" not in type(error).__name__


def _refused(status: int) -> None:
    """Raise for an HTTP status that no attempt changes (4xx but 408 and 429), or for one that may pass (5xx)."""
    if status in (404, 410):
        raise Gone(f"does not exist on the server ({status}). Check the address; braces name shards by number.")
    if status in (401, 403):
        raise Gone(f"the server does not permit it ({status}). Give credentials as fsspec takes them, or sign the URL.")
    if 400 <= status < 500 and status not in (408, 429):
        raise Gone(f"the server refuses it ({status}). Check the address.")
    if status >= 400:
        raise ConnectionError(f"the server answers {status}")


class Http:
    """HTTP and HTTPS through fsspec's session, which has the user's settings (headers, proxies) for it."""

    def __init__(self, system: Any) -> None:
        self.system = system
        self._sync = importlib.import_module("fsspec.asyn").sync
        aiohttp = importlib.import_module("aiohttp")
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=NO_ANSWER / 2, sock_read=NO_ANSWER)

    def _get(self, url: str, headers: dict[str, str], handle: Callable[[Any], Any]) -> Any:
        async def get() -> Any:
            session = await self.system.set_session()
            settings = {**self.system.kwargs, "timeout": self._timeout}
            settings["headers"] = {**settings.get("headers", {}), "Accept-Encoding": "identity", **headers}
            async with session.get(self.system.encode_url(url), **settings) as response:
                _refused(response.status)
                return await handle(response)

        return self._sync(self.system.loop, get)

    @staticmethod
    def _about(response: Any) -> About:
        headers = response.headers
        total = headers.get("Content-Range", "").rpartition("/")[2]
        size = total if response.status == 206 else headers.get("Content-Length", "")
        tag = headers.get("ETag") or headers.get("Last-Modified") or ""
        return About(int(size) if size.isdigit() else None, tag, response.status == 206 and size.isdigit())

    def about(self, url: str) -> About:
        """From the answer to a request for the first byte; a server that sends all is not listened to further."""

        async def look(response: Any) -> About:
            return self._about(response)

        return self._get(url, {"Range": "bytes=0-0"}, look)

    def read(self, url: str, start: int, end: int, about: About) -> bytes:
        """Bytes `start` to `end`."""

        async def take(response: Any) -> bytes:
            if self._about(response) != about:  # another size or tag, or no ranges any more
                raise Changed
            return await response.read()

        return self._get(url, {"Range": f"bytes={start}-{end - 1}"}, take)

    def download(self, url: str, into: BinaryIO, about: About) -> None:
        """All of it, piece by piece."""

        async def take(response: Any) -> None:
            got = self._about(response)
            if (got.size, got.tag) != (about.size, about.tag):
                raise Changed
            async for piece in response.content.iter_chunked(_PIECE):
                into.write(piece)

        self._get(url, {}, take)


class Store:
    """S3 and every other store that fsspec reads; credentials come from where its package takes them."""

    def __init__(self, system: Any) -> None:
        self.system = system

    def _asked(self, act: Callable[[], T]) -> T:
        try:
            return act()
        except FileNotFoundError:
            raise Gone("does not exist in the store. Check the address; braces name shards by number.") from None
        except PermissionError:
            raise Gone("the store does not permit it. Give credentials by the environment or a profile.") from None

    def about(self, url: str) -> About:
        """From the store's listing; never from fsspec's cache of it."""

        def look() -> About:
            self.system.invalidate_cache()
            info = self.system.info(url)
            tags = (str(info[key]) for key in ("ETag", "etag", "LastModified", "mtime", "created") if info.get(key))
            return About(info.get("size"), next(tags, ""), info.get("size") is not None)

        return self._asked(look)

    def read(self, url: str, start: int, end: int, about: About) -> bytes:
        """Bytes `start` to `end`."""
        return self._asked(lambda: self.system.cat_file(url, start=start, end=end))

    def download(self, url: str, into: BinaryIO, about: About) -> None:
        """All of it."""
        self._asked(lambda: into.write(self.system.cat_file(url)))

    def glob(self, pattern: str) -> list[str]:
        """Addresses that a pattern names, sorted."""
        return sorted(self.system.unstrip_protocol(name) for name in self._asked(lambda: self.system.glob(pattern)))


class Pipe:
    """`pipe:COMMAND` (webdataset's convention): a shell command that writes the shard to its standard output."""

    def about(self, url: str) -> About:
        """Nothing is known before the command has run."""
        return About(None, "", False)

    def read(self, url: str, start: int, end: int, about: About) -> bytes:
        """Not possible: a pipe is read from its beginning."""
        raise NotImplementedError

    def download(self, url: str, into: BinaryIO, about: About) -> None:
        """Run the command into the file."""
        command = url.partition(":")[2]
        done = subprocess.run(command, shell=True, stdin=subprocess.DEVNULL, stdout=into, stderr=subprocess.PIPE)
        if done.returncode:
            said = re.sub(r"\s+", " ", done.stderr.decode(errors="replace")).strip()[-200:]
            raise Gone(f"the command ended with exit code {done.returncode} ({said or 'it said nothing'}). Correct it.")
