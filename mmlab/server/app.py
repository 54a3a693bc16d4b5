"""The extension of Jupyter's server: `jupyter server extension list` shows it as `mmlab.server`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jupyter_server.extension.application import ExtensionApp
from tornado import web
from traitlets import Bool, Unicode

from mmlab.server import handlers
from mmlab.server.desk import Desk

READERS, ACTORS = 3, 3
"""Threads that look at files, and threads that write commands, start and end labs: what hangs in one kind leaves the
other, and Jupyter's own loop, alone."""
WAITING = 32
"""Requests of a kind at work or waiting; further ones are refused."""


class Crew:
    """A few threads with a bounded queue."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._waiting = 0

    async def do(self, timeout: float, work: Callable[..., Any], *args: Any) -> Any:
        """Have a thread do it. HTTP error 503 when too much waits, 504 after `timeout` seconds (it goes on)."""
        if self._waiting >= WAITING:
            raise web.HTTPError(503, "mmlab: too many requests wait; is a disk slow?")
        self._waiting += 1
        future = asyncio.get_running_loop().run_in_executor(self._pool, work, *args)
        future.add_done_callback(self._done)
        try:
            return await asyncio.wait_for(asyncio.shield(future), timeout)
        except TimeoutError:
            raise web.HTTPError(504, f"mmlab: no answer within {timeout:g} s; is a disk slow?") from None

    def _done(self, future: asyncio.Future[Any]) -> None:
        self._waiting -= 1
        if not future.cancelled():
            future.exception()  # seen: whoever waited has been told, or has left

    def end(self) -> None:
        """Take no more."""
        self._pool.shutdown(wait=False, cancel_futures=True)


class MmlabServer(ExtensionApp):
    """Routes below `/mmlab`: labs and runs, also while kernels are busy or dead."""

    name = "mmlab"
    load_other_extensions = True

    root_dir = Unicode("", help="Runs below this folder are shown and steered; empty: the server's root folder.").tag(
        config=True
    )
    allow_control = Bool(
        True, help="Whether runs can be steered, and labs started and closed, from pages. False: only looked at."
    ).tag(config=True)

    def initialize_settings(self) -> None:
        """Make what the handlers use."""
        assert self.serverapp is not None
        root = self.root_dir or self.serverapp.root_dir
        self.desk = Desk(root)
        self.readers, self.actors = Crew(READERS, "mmlab-read"), Crew(ACTORS, "mmlab-act")

    def initialize_handlers(self) -> None:
        """Add the routes; the base URL is put before them."""
        self.handlers.extend(handlers.ROUTES)

    async def stop_extension(self) -> None:
        """End with the server."""
        self.readers.end()
        self.actors.end()
