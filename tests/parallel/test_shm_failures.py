"""Shared-memory groups when something goes wrong: ranks that die, do not come, or are to be freed."""

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import shm_functions
import torch.distributed as dist

from mmlab.messages.shared_file import process_start
from mmlab.parallel.shm import PeerLost, read_calls
from mmlab.train.worker import _kind


@pytest.mark.parametrize("where", ["collective", "receive"])
def test_an_abort_frees_the_ranks_of_all_groups_and_new_ones_can_be_made(pool, where):
    pool.grow(3)
    results = pool.run(shm_functions.abort, where, ranks=3)
    for stuck in results[:2]:
        assert "connection to the peers was aborted" in stuck["error"]
    assert "unharmed" not in results[2]
    assert results[2]["groups"] == 2
    assert [result["total"] for result in results] == [3] * 3


def test_ranks_that_make_different_calls_are_told(pool):
    for rank, message in enumerate(pool.run(shm_functions.mismatch, ranks=2)):
        assert f"peer rank {1 - rank}" in message
        assert "all_reduce of 12 bytes" in message
        assert "all_gather of 16 bytes" in message


def test_a_rank_that_does_not_come_is_named(pool):
    first, second = pool.run(shm_functions.late, ranks=2)[0]
    assert "timed out waiting for peer rank 1 in all_reduce #2" in first
    assert second == first  # the ranks are no longer in step, so the group is of no use any more


def test_what_is_lost_counts_as_the_failure_of_a_peer():
    for reason in ("connection to peer rank 2 lost: its process ended", "timed out waiting for peer rank 1"):
        assert _kind(PeerLost(f"shm: {reason}")) == "peer"
        assert _kind(RuntimeError(f"shm: {reason}")) == "peer"


def wait_for(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def ranks(tmp_path):
    """Three ranks in processes of their own, of which the second hangs."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    program = Path(__file__).with_name("shm_rank.py")
    processes = [
        subprocess.Popen(
            [sys.executable, program, str(rank), "3", str(store.port)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in range(3)
    ]  # fmt: skip
    yield processes
    for process in processes:
        process.kill()
        process.wait()
        process.stdout.close()


def world_of(process):
    """The calls of the group of all, as a look from outside shows them."""
    return next((group for group in read_calls(process.pid) if len(group.ranks) == 3), None)


def stuck(process):
    group = world_of(process)
    return group is not None and group.ranks[0].p2p is not None and group.ranks[2].entered > group.ranks[2].done


def test_a_killed_rank_is_noticed_and_a_look_from_outside_shows_who_waits_for_what(ranks):
    wait_for(lambda: stuck(ranks[1]), 60)
    group = world_of(ranks[1])
    assert [rank.pid for rank in group.ranks] == [process.pid for process in ranks]
    assert group.ranks[0].p2p[:4] == ("recv", 1, 7, 20)
    assert (group.ranks[2].op, group.ranks[2].bytes) == ("all_reduce", 20)
    assert group.missing == (0, 1)
    assert abs(group.ranks[2].time - time.time()) < 60
    assert not group.aborted
    ranks[1].send_signal(signal.SIGKILL)
    for rank in (0, 2):
        output, _ = ranks[rank].communicate(timeout=60)
        lost = output.splitlines()[0]  # not by a timeout, which is 30 minutes
        assert f"connection to peer rank 1 (pid {ranks[1].pid}) lost: its process ended" in lost
        assert output.splitlines()[1] == "2.0"
        assert ranks[rank].returncode == 0
    assert read_calls(ranks[1].pid) == []
    assert not shm_functions.left_behind()


def test_a_process_that_ended_has_no_start():
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    try:
        wait_for(lambda: process_start(process.pid) == 0)  # a zombie until it is waited for
    finally:
        process.wait()
    assert process_start(process.pid) == 0
    assert process_start(os.getpid()) > 0
