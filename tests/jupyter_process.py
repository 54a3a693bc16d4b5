"""A Jupyter server in a process of its own, for tests of its routes and of what stands in its pages."""

from __future__ import annotations

import contextlib
import http.client
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PORTS = range(20_000, 32_000)
"""Ports that the kernel gives to nobody who asks for any (those begin at 32,768): of these one that was free was taken
by an engine or a kernel while the server, which takes seconds to start, was not there yet."""


def free_port(wanted: int = 0) -> int:
    """A port of this host that nobody listens on, and which that is (0: any)."""
    for port in [wanted] if wanted else random.SystemRandom().sample(PORTS, 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError(f"port {wanted or PORTS} is taken")


def answers(port: int) -> bool:
    """Whether a web server answers there, with whatever. One that only listens may stop again: Jupyter's server tries a
    port, closes it, and listens later."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/")
        connection.getresponse()
        return True
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


@contextmanager
def answering(command: Sequence[str | Path], port: int, log: Path, **options: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A server as a process (with `subprocess`'s options), from when it answers on its port until it is told to end."""
    with open(log, "w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, **options)
    try:
        end = time.monotonic() + 90
        while not answers(port):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:  # on a loaded machine Jupyter's server sometimes hangs at its own exit
            process.kill()
            process.wait()


@contextmanager
def serving(
    module: str,
    root: Path,
    private: Path,
    token: str,
    options: list[str],
    environment: dict[str, str],
    port: int = 0,
) -> Iterator[int]:
    """`python -m module` on `root` with its own files in `private`, where its log is; the port (0: any), once it
    answers."""
    port = free_port(port)
    folders = {f"JUPYTER_{kind}_DIR": str(private / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")}
    command = [
        sys.executable, "-m", module, "--no-browser", f"--port={port}", "--port-retries=0", "--allow-root",
        f"--IdentityProvider.token={token}", f"--ServerApp.root_dir={root}", *options,
    ]  # fmt: skip
    with answering(command, port, private / "server.log", env=os.environ | folders | environment):
        yield port
