"""Warm ranks: results, a fresh group each call, and no hang without the stacks of all ranks."""

import pool_functions
import psutil
import pytest

from mmlab.cluster.pool import RankError, RankPool, RankTimeout


@pytest.fixture(scope="module")
def pool():
    with RankPool(3) as pool:
        yield pool
        pids = pool.pids
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


def test_each_call_has_its_own_group_and_results_come_in_rank_order(pool):
    assert pool.run(pool_functions.total, 2.0, timeout=60) == [(12.0, 1)] * 3
    pids = pool.pids
    assert pool.run("pool_functions:total", 1.0, power=2, ranks=2) == [(5.0, 1)] * 2
    assert pool.pids == pids  # warm: the same processes


def test_an_exception_names_its_rank_and_the_next_call_works(pool):
    pids = pool.pids
    with pytest.raises(RankError) as caught:
        pool.run(pool_functions.fail, 1)
    assert next(iter(caught.value.tracebacks)) == 1
    assert "KeyError: 'scripted'" in caught.value.tracebacks[1]
    assert not [pid for pid in pids if psutil.pid_exists(pid)]  # nobody stays in the barrier
    assert pool.run(pool_functions.total, 1.0) == [(6.0, 1)] * 3


def test_a_timeout_shows_where_every_rank_is(pool):
    third = pool.pids[2]
    with pytest.raises(RankTimeout, match="rank 1 of 2 did not end within 2 s") as caught:
        pool.run(pool_functions.hang, ranks=2, timeout=2)
    assert "sleeping_on_purpose" in caught.value.tracebacks[1]
    assert set(caught.value.tracebacks) == {0, 1}
    assert pool.pids == [third]  # it was not in the call


def test_a_process_that_ends_is_reported_with_its_last_words(pool):
    with pytest.raises(RankError, match="exit code 7") as caught:
        pool.run(pool_functions.die, ranks=2)
    assert "last words" in caught.value.tracebacks[1]


def test_more_ranks_than_the_pool_has(pool):
    with pytest.raises(ValueError, match="9 ranks asked of a pool of 3"):
        pool.run(pool_functions.total, 1.0, ranks=9)
