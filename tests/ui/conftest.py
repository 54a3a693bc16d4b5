"""A synthetic run for what reads runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect

from ui.synthetic import SyntheticRun, playing

expect.set_options(timeout=60_000)
"""Milliseconds, as in `wait_for`: on a loaded machine the five seconds that are usual pass in a stall."""


@pytest.fixture
def started(tmp_path: Path) -> Iterator[SyntheticRun]:
    """A run whose ranks have started; nothing is trained yet."""
    with playing(tmp_path) as run:
        yield run
