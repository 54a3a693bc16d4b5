"""A real Jupyter server in a process of its own, and requests to it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jupyter_process import serving

TOKEN = "a-token-for-tests"
BASE = "/hub/user/someone/"


class Server:
    """Where it listens; requests come with the token unless told otherwise."""

    def __init__(self, port: int, root: Path) -> None:
        self.port = port
        self.root = root

    def ask(
        self, method: str, path: str, body: Any = None, token: str | None = TOKEN, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """(status, JSON or text) of a request to a path below the base URL, or an absolute one."""
        status, text, _ = self.raw(method, path, body, token, headers)
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text

    def raw(
        self, method: str, path: str, body: Any = None, token: str | None = TOKEN, headers: dict[str, str] | None = None
    ) -> tuple[int, str, list[tuple[str, str]]]:
        """(status, text, headers)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        sent = dict(headers or {}) | ({"Authorization": f"token {token}"} if token else {})
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        try:
            connection.request(method, path if path.startswith("/") else BASE + path, data, sent)
            answer = connection.getresponse()
            return answer.status, answer.read().decode(), answer.getheaders()
        finally:
            connection.close()

    def run(self, key: str, **query: str) -> Any:
        more = "?" + "&".join(f"{name}={quote(value)}" for name, value in query.items()) if query else ""
        status, found = self.ask("GET", f"mmlab/runs/{quote(key)}{more}")
        assert status == 200, found
        return found


@contextmanager
def jupyter_server(
    root: Path, private: Path, *options: str, environment: dict[str, str] | None = None
) -> Iterator[Server]:
    """A server on `root` with mmlab's extension alone, at BASE; its own files go to `private`."""
    more = [f"--ServerApp.base_url={BASE}", "--ServerApp.jpserver_extensions={'mmlab.server': True}", *options]
    with serving("jupyter_server", root, private, TOKEN, more, environment or {}) as port:
        yield Server(port, root)
