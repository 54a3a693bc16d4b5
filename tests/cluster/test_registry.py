"""Labs written down: private files, clients, requests, and leftovers of dead keepers."""

import shutil
import subprocess
import sys
import time
from dataclasses import asdict

import pytest

from mmlab.cluster import registry
from mmlab.cluster.queue import Queue
from mmlab.cluster.registry import LabConfig, LabPaths
from mmlab.errors import LabError
from mmlab.messages.events import last_state
from mmlab.messages.files import read_json, write_json
from mmlab.messages.runs import create_run


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


def test_what_another_lab_has_started_again_goes_on_when_its_first_one_is_closed(paths, tmp_path, monkeypatch):
    stays, moved, deleted = (create_run(tmp_path / "runs", "plan", "", 1, 1) for _ in range(3))
    for run, root in ((stays, paths.root), (moved, paths.root.with_name("other"))):
        write_json(run.run, read_json(run.run) | {"lab": {"root": str(root), "host": "here"}})
    deleted.run.unlink()
    runs = [str(run.root) for run in (stays, moved, deleted)]
    registry.write_private(paths.state, {"keeper": registry.this_process(), "runs": runs})
    assert registry.read_info(paths)["runs"] == runs[:1]
    monkeypatch.setattr(registry, "force_end", lambda *_: None)  # this process is the keeper
    assert registry.end_lab(paths, read_json(paths.state), timeout=0.0) == "forced"
    assert [last_state(run.events) for run in (stays, moved)] == ["stopped", "queued"]


def test_a_lab_that_ends_while_it_is_to_grow_is_not_waited_for(paths, monkeypatch):
    monkeypatch.setattr(registry, "ask", lambda *_, **__: shutil.rmtree(paths.root))
    with pytest.raises(LabError, match="lab abc has ended"):
        registry.grow(paths, 2)


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
