"""Fixtures for all tests."""

from collections.abc import Iterator

import pytest

from mmlab.cluster.pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Warm ranks for distributed tests: `pool.run(module.function, *args, ranks=2)`; `pool.grow(4)` for more."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="session", autouse=True)
def _without_dali() -> Iterator[None]:
    """Some machines have NVIDIA DALI; what a plan is refused for is tried as on one that has not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmlab.plan.rules.data.has_dali", lambda: False)
        yield
