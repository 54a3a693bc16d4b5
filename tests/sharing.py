"""A tier in several pytest processes at once: each takes the next module that none has taken yet.

    pytest -m slow --share FOLDER     started twice, with the same folder, which is empty at first

Each process stays a plain one, with its own fixtures, summary and exit code; a timeout ends one of them, and the others
go on. (pytest-xdist with modules kept whole runs a test whose process has ended again, eight times, and loses the
stacks.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest


def taken(items: Iterable[pytest.Item], folder: Path) -> Iterator[pytest.Item]:
    """Of these tests, in order, those of modules that this process takes; it takes a module when it gets there."""
    mine: dict[Path, bool] = {}
    for item in items:
        if item.path not in mine:
            mine[item.path] = _take(folder / item.nodeid.split("::")[0].replace("/", "+"))
        if mine[item.path]:
            yield item


def _take(path: Path) -> bool:
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def run_taken(session: pytest.Session, folder: Path) -> None:
    """What pytest's own loop does, over the tests that this process takes."""
    folder.mkdir(parents=True, exist_ok=True)
    items = taken(session.items, folder)
    item = next(items, None)
    while item is not None:
        following = next(items, None)
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        item = following
