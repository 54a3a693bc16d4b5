"""A synthetic run for what reads runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ui.synthetic import SyntheticRun


@pytest.fixture
def started(tmp_path: Path) -> Iterator[SyntheticRun]:
    """A run whose ranks have started; nothing is trained yet."""
    run = SyntheticRun(tmp_path)
    run.start()
    yield run
    run.close()
