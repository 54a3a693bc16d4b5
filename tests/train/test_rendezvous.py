"""The rendezvous across two hosts: two network namespaces joined by a veth pair."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import train_functions
from live import make_plan
from two_hosts import possible

from mmlab.cluster.netns import two_hosts
from mmlab.messages import RunPaths, read_events
from mmlab.train.worker import routable_address

RANK = """
import json, sys
from mmlab.train.job import Job
from mmlab.train.worker import open_store, run_worker
rank, run_dir = int(sys.argv[1]), sys.argv[2]
if rank == 0:
    host, port, store = open_store()
    print(json.dumps([host, port]), flush=True)
else:
    host, port = sys.argv[3], int(sys.argv[4])
state = run_worker(Job(run_dir, rank, 2, host, port))
sys.exit(state != "finished")
"""


@pytest.fixture
def hosts():
    """The namespaces of two hosts that nothing but a link joins."""
    with two_hosts() as pair:
        yield pair


@possible
@pytest.mark.slow
def test_ranks_of_two_hosts_find_each_other(hosts, shards, tmp_path):
    plan = make_plan(shards, "parallel.pp=1", "train.steps=2")
    paths = RunPaths(tmp_path / "run")
    paths.create()
    plan.save(paths.plan)
    started = []

    def rank(host, *arguments):
        command = [*host.command, sys.executable, "-c", RANK, *arguments]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        environment.pop("GLOO_SOCKET_IFNAME", None)
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True, cwd=Path.cwd()
        )
        started.append(process)
        return process

    try:
        first = rank(hosts[0], "0", str(paths.root))
        host, port = json.loads(first.stdout.readline())
        assert host == hosts[0].address
        second = rank(hosts[1], "1", str(paths.root), host, str(port))
        assert second.wait(60) == 0, read_events(paths.events)
        assert first.wait(60) == 0
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
            process.stdout.close()
    assert [e["state"] for e in read_events(paths.events)[0] if e["kind"] == "state"] == [
        "starting",
        "running",
        "finished",
    ]


def test_a_hint_wins_over_the_default_route():
    assert routable_address("192.0.2.7") == "192.0.2.7"
    assert routable_address() != ""


def test_a_rank_whose_group_broke_off_meets_the_others(pool, shards):
    plan = make_plan(shards, "parallel.pp=1")
    args = (train_functions.meet_after_a_break, plan.dumps())
    assert pool.run(*args, ranks=plan.world_size, timeout=60) == [plan.world_size] * plan.world_size
