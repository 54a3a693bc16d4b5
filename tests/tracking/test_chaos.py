"""Faults on purpose, as whoever asks for them sees it: what is refused, and what is done at once."""

import subprocess
import sys
import time

import pytest

from mmlab.errors import CheckpointError, MmlabError
from mmlab.lab import Run
from mmlab.messages import EventLog, Inbox, read_json, write_json
from mmlab.messages.notices import take_notices
from mmlab.messages.runs import create_run
from mmlab.plan import Plan

RANK = """
import sys, time
from pathlib import Path
from mmlab.messages import Beacon
import socket
beacon = Beacon(Path(sys.argv[1]), 1, "stage 0", socket.gethostname(), 0)
beacon.step = 7
beacon.update("backward")
print(flush=True)
time.sleep(60)
"""


@pytest.fixture
def run(tmp_path):
    plan = Plan.preset("laptop")
    paths = create_run(tmp_path, "x", plan.dumps(), plan.world_size, 10)
    say(paths, "running")
    return Run(paths.root)


def say(paths, state):
    log = EventLog(paths.events)
    log.emit("state", state=state, step=0, reason="")
    log.close()


def save(run, name, step, time):
    folder = run.dir / "checkpoints" / name
    folder.mkdir()
    (folder / "large").write_bytes(bytes(range(100)))
    (folder / "small").write_bytes(b"x")
    files = {"large": {"size": 100, "sha256": ""}, "small": {"size": 1, "sha256": ""}}
    write_json(folder / "manifest.json", {"name": name, "step": step, "time": time, "lineage": "", "files": files})
    return folder


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({}, "one action at a time, of kill, hang, slow, notice, corrupt, such as kill=1"),
        ({"kill": 1, "hang": 1}, "one action at a time, .* not kill, hang"),
        ({"maim": 1}, "one action at a time, .* not maim"),
        ({"kill": 3}, "chaos kill=3: the run has ranks 0 to 2"),
        ({"hang": -1}, "chaos hang=-1: the run has ranks 0 to 2"),
        ({"kill": "one"}, "chaos kill= takes a rank, not 'one'"),
        ({"kill": True}, "chaos kill= takes a rank, not True"),
        ({"slow": 1}, "chaos slow= needs seconds="),
        ({"slow": 1, "seconds": -1}, "chaos slow= needs seconds="),
        ({"slow": 1, "seconds": "x"}, "chaos slow= needs seconds="),
        ({"kill": 1, "seconds": 1}, "seconds= goes with slow"),
        ({"notice": 7}, "chaos notice=7: the run has ranks 0 to 2"),
        ({"notice": 1}, "chaos notice=1: that rank has not started yet"),
        ({"notice": 1, "seconds": -1}, "takes seconds= until"),
        ({"notice": 1, "seconds": "x"}, "takes seconds= until"),
        ({"hang": 1, "phase": "lunch"}, "phase= .* is one of data, encode, forward"),
        ({"corrupt": 1}, 'corrupt= takes "last" or the name of a checkpoint, not 1'),
        ({"corrupt": "last", "phase": "data"}, "phase= goes with kill"),
    ],
)
def test_what_makes_no_sense_is_refused(run, asked, message):
    with pytest.raises(MmlabError, match=message):
        run.chaos(**asked)
    assert not Inbox(run._record.paths.control).pending()


def test_an_ended_run_and_a_run_without_checkpoints_are_left_alone(run):
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        run.chaos(corrupt="last")
    say(run._record.paths, "finished")
    with pytest.raises(MmlabError, match="has ended"):
        run.chaos(kill=1)


def test_one_byte_of_the_newest_checkpoint_is_another(run):
    old, new = save(run, "old", 2, 1.0), save(run, "new", 4, 2.0)
    ack = run.chaos(corrupt="last").wait()
    assert ack.message == "flipped byte 50 of large in checkpoint new"
    changed = (new / "large").read_bytes()
    assert [place for place in range(100) if changed[place] != place] == [50]
    assert run.events()[-1]["verb"] == "chaos"
    run.chaos(corrupt="old")
    assert (old / "large").read_bytes() != bytes(range(100))
    with pytest.raises(CheckpointError, match="has no checkpoint other"):
        run.chaos(corrupt="other")


def test_a_process_of_this_host_is_killed_at_once_and_the_log_says_so(run):
    arguments = [sys.executable, "-c", RANK, str(run.dir / "ranks" / "rank-1.beacon")]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        began = time.time()
        assert run.chaos(notice=1, seconds=5).wait().message.startswith("notice to rank 1 (stage 0, pid ")
        ((_, notice),) = take_notices(run._record.paths)
        assert (notice.pid, notice.source) == (process.pid, "chaos")
        assert began <= notice.deadline - 5 <= time.time()
        ack = run.chaos(kill=1).wait()
        assert process.wait(60) == -9
    assert ack.message.startswith("SIGKILL to rank 1 (stage 0, pid ")
    assert ack.message.endswith("in backward of step 7")
    assert [event["args"]["action"] for event in run.events() if event["kind"] == "command"] == ["notice", "kill"]


def test_what_needs_the_ranks_goes_through_the_inbox(run):
    for asked in ({"hang": 1}, {"slow": 0, "seconds": 0.5, "phase": "forward"}, {"kill": 2}):
        sent = run.chaos(**asked)
        found = read_json(sent.control / f"{sent.id}.json")
        assert found["verb"] == "chaos"
    assert found["args"] == {"action": "kill", "rank": 2}  # there is no beacon of this host
