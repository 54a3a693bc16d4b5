"""A synthetic run for what reads runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ui.synthetic import SyntheticRun, playing


@pytest.fixture
def started(tmp_path: Path) -> Iterator[SyntheticRun]:
    """A run whose ranks have started; nothing is trained yet."""
    with playing(tmp_path) as run:
        yield run
