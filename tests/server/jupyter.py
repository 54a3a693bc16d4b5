"""A real Jupyter server in a process of its own, and requests to it."""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

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
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folders = {f"JUPYTER_{kind}_DIR": str(private / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")}
    command = [
        sys.executable, "-m", "jupyter_server", "--no-browser", f"--port={port}", "--allow-root",
        f"--IdentityProvider.token={TOKEN}", f"--ServerApp.base_url={BASE}", f"--ServerApp.root_dir={root}",
        "--ServerApp.jpserver_extensions={'mmlab.server': True}", *options,
    ]  # fmt: skip
    with open(private / "server.log", "w") as log:
        values = os.environ | folders | (environment or {})
        process = subprocess.Popen(command, env=values, stdout=log, stderr=subprocess.STDOUT)
    try:
        end = time.monotonic() + 60
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, (private / "server.log").read_text()
            assert time.monotonic() < end, (private / "server.log").read_text()
            time.sleep(0.05)
        yield Server(port, root)
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
