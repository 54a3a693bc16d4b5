"""Labs written down: private files, clients, requests, and leftovers of dead keepers."""

import subprocess
import sys
import time
from dataclasses import asdict

import pytest

from mmlab.cluster import registry
from mmlab.cluster.queue import Queue
from mmlab.cluster.registry import LabConfig, LabPaths


@pytest.fixture
def paths(tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    paths = LabPaths(registry.registry() / "abc")
    for folder in (paths.control, paths.clients):
        folder.mkdir(parents=True)
    config = LabConfig("abc", 1, "", None, 1.0, 1.0, "worker", time.time())
    registry.write_private(paths.config, asdict(config))
    return paths


def test_files_are_private_and_requests_come_in_order(paths):
    assert paths.config.stat().st_mode & 0o777 == 0o600
    registry.ask(paths, "engines", n=1)
    registry.ask(paths, "close")
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in paths.control.iterdir())
    (paths.control / "99999999999999999999-x.json").write_text("no request")
    assert [request["verb"] for request in registry.take_requests(paths)] == ["engines", "close"]
    assert list(paths.control.iterdir()) == []


def test_a_request_to_a_lab_that_has_ended_is_no_error(paths):
    paths.control.rmdir()
    registry.ask(paths, "close")


def test_clients_that_ended_do_not_count(paths):
    registry.attach_client(paths)
    code = "from mmlab.cluster.registry import *; attach_client(LabPaths(Path(sys.argv[1])))"
    subprocess.run([sys.executable, "-c", code, paths.root], check=True)
    assert len(list(paths.clients.iterdir())) == 2
    assert registry.live_clients(paths) == 1
    assert len(list(paths.clients.iterdir())) == 1


def test_a_lab_being_born_lives_and_one_without_keeper_is_cleaned(paths):
    assert [found.root.name for found in registry.live_labs()] == ["abc"]
    assert registry.clean_leftovers() == []
    keeper = registry.this_process() | {"started": 1.0}
    registry.write_private(
        paths.state, {"keeper": keeper, "processes": [], "cancel": [["touch", str(paths.root.parent / "cancelled")]]}
    )
    assert registry.live_labs() == []
    assert registry.clean_leftovers() == ["abc"]
    assert not paths.root.exists()
    assert (paths.root.parent / "cancelled").exists()


def test_a_queue_knows_when_a_job_has_left(tmp_path, monkeypatch):
    squeue = tmp_path / "squeue"
    squeue.write_text(f"#!/bin/sh\ncat {tmp_path}/answer\n")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    answer = tmp_path / "answer"
    queue = Queue(slurm=True, every=0.0)
    time.sleep(1.1)
    answer.write_text("")
    assert not queue.left("7")  # not listed yet
    answer.write_text("PENDING (Priority)\n")
    assert not queue.left("7")
    assert queue.state == "PENDING (Priority)"
    answer.unlink()
    assert not queue.left("7")  # the question failed: nothing is known
    answer.write_text("")
    assert queue.left("7")
    assert not Queue(slurm=False, every=0.0).left("7")
