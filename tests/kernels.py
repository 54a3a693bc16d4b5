"""Kernels of tests, which talk over files: the ports of a kernel are picked before it listens on them, a second later,
and meanwhile engines of another test on this machine are given some."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def over_files() -> Iterator[dict[str, str]]:
    """Settings of a kernel's manager. Its sockets lie in a folder of their own: their names have at most 107
    characters."""
    with tempfile.TemporaryDirectory(prefix="kernel-", ignore_cleanup_errors=True) as folder:
        yield {"transport": "ipc", "ip": f"{folder}/k"}
