"""Fixtures for all tests."""

import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from sharing import run_taken
from what_happened import FAILED, what_happened

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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", type=Path, metavar="FOLDER", help="run modules that no other process there has taken")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Pytest's own loop, or where several processes share the tests, that over what this one takes."""
    folder = session.config.getoption("--share")
    if folder is None or session.testsfailed or session.config.option.collectonly:
        return None
    run_taken(session, folder)
    return True


SLOW = 300
"""Seconds for a slow test that says nothing itself (at a load of ten on two cores one took 106 and one 98 s): two
processes share them, and a test whose time is over ends its process, all tests that were still to come included."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW))


BEGAN = pytest.StashKey[float]()
TOLD = 2
"""Failed tests of which all is told; those after them often fail for what these left behind."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    item.stash[BEGAN] = time.time()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Below a failed test of processes: what its runs and labs say of themselves. A race is seldom seen twice."""
    report = yield
    item.stash[FAILED] = item.stash.get(FAILED, False) or report.failed
    if report.failed and item.get_closest_marker("slow") and item.session.testsfailed < TOLD:
        place: Path = item.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        try:
            report.sections += what_happened(place, item.stash[BEGAN])
        except Exception as error:  # the report of the failure itself is worth more
            report.sections.append(("what happened", f"could not be read: {error!r}"))
    return report
