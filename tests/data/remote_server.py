"""A file server on this machine that behaves as badly as it is told to."""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


@dataclass
class Site:
    """Files of a folder by HTTP. `ranges`: answers Range; `tags`: sends ETag; `cut`: so many first
    answers about each file break off half way; `status`: answers that instead; `wait`: seconds before each answer."""

    folder: Path
    url: str = ""
    ranges: bool = True
    tags: bool = True
    cut: int = 0
    status: dict[str, int] = field(default_factory=dict)
    wait: float = 0.0
    asked: list[tuple[str, str]] = field(default_factory=list)
    """(path, Range) of each request."""

    def of(self, name: str) -> list[str]:
        """The ranges of a file that were asked for, but for the look at its first byte."""
        return [r for path, r in self.asked if path.endswith(name) and r != "bytes=0-0"]


def _handler(site: Site) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def handle(self) -> None:
            with suppress(ConnectionError):  # who asked has seen enough
                super().handle()

        def do_GET(self) -> None:
            name, wanted = self.path.partition("?")[0], self.headers.get("Range", "")
            site.asked.append((name, wanted))
            time.sleep(site.wait)
            file = site.folder / name.lstrip("/")
            status = site.status.get(name.rpartition("/")[2], 200 if file.is_file() else 404)
            if status != 200:
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            data = file.read_bytes()
            total, part = len(data), re.fullmatch(r"bytes=(\d+)-(\d+)", wanted) if site.ranges else None
            self.send_response(206 if part else 200)
            if part:
                start, end = int(part[1]), min(int(part[2]), total - 1)
                self.send_header("Content-Range", f"bytes {start}-{end}/{total}")
                data = data[start : end + 1]
            if site.tags:
                self.send_header("ETag", f'"{hashlib.md5(file.read_bytes()).hexdigest()}"')
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if wanted != "bytes=0-0" and len(site.of(name)) <= site.cut:
                self.wfile.write(data[: len(data) // 2])
                self.close_connection = True
                return
            self.wfile.write(data)

    return Handler


@contextmanager
def serving(folder: Path) -> Iterator[Site]:
    """A site on a free port of this machine."""
    site = Site(folder)
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(site))
    server.daemon_threads = True
    site.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
