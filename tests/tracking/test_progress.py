"""Bars on terminals, nothing in pipes; commands that wait for their answer."""

import io
import threading
import time

import pytest
from rich.console import Console

from mmlab.errors import MmlabError, RunFailed
from mmlab.messages import Ack, EventLog, Failure, Inbox, claim_report, new_command, send, write_failure
from mmlab.messages.runs import create_run
from mmlab.tracking import RunRecord, waiting
from mmlab.tracking.progress import Silent, Terminal, progress_bar
from mmlab.tracking.sent import Sent, WaitTimeout
from mmlab.tracking.waiting import settle, wait_for, words


@pytest.fixture
def paths(tmp_path):
    return create_run(tmp_path, "x", "", world_size=1, steps=10)


def test_a_terminal_gets_a_bar_and_a_pipe_gets_none():
    output = io.StringIO()
    with Terminal("my-run", Console(file=output, force_terminal=True, width=100)) as bar:
        bar.update(3, 10, "loss 2.5")
    assert "my-run" in output.getvalue()
    assert "3/10" in output.getvalue()
    assert "loss 2.5" in output.getvalue()
    with progress_bar("my-run") as bar:  # tests' output is captured
        assert isinstance(bar, Silent)


def test_waiting_ends_with_the_run(paths):
    log = EventLog(paths.events, "a")
    record = RunRecord(paths.root)
    threading.Timer(0.2, lambda: log.emit("state", state="finished", step=10, reason="")).start()
    wait_for(record, record.status, None, 10, True)
    assert record.status()["state"] == "finished"
    log.emit("state", state="failed", step=10, reason="rank 1 failed")
    with pytest.raises(RunFailed, match="rank 1 failed; logs are in"):
        wait_for(record, record.status, None, 10, True)
    log.close()


def test_waiting_in_words(paths):
    log = EventLog(paths.events, "a")
    log.emit("lineage", id="a", parent="", parent_step=0, step=0)
    log.emit("state", state="paused", step=1, reason="")
    log.emit("step", step=1, loss=2.34567, tokens_per_s=120.4)
    record = RunRecord(paths.root)
    assert words(record, record.status()) == "paused, loss 2.346, 120 tokens/s"
    log.close()


@pytest.mark.parametrize(
    ("ok", "shown"), [(True, "pause: applied after step 7, done"), (False, "pause: refused: done")]
)
def test_a_command_shows_what_became_of_it(paths, ok, shown):
    command = new_command("pause")
    send(paths.control, command)
    sent = Sent("pause", command.id, paths.control)
    assert repr(sent) == "pause: sent, applied at the next step boundary"
    with pytest.raises(WaitTimeout, match="still waits"):
        sent.wait(0.05)
    Inbox(paths.control).answer(Ack(command.id, ok, 7, [0], "done", time.time()))
    assert repr(sent) == shown
    if ok:
        assert sent.wait().step == 7
    else:
        with pytest.raises(MmlabError, match="pause was refused: done"):
            sent.wait()


@pytest.mark.parametrize("claimed", [False, True])
def test_a_failure_is_in_the_log_before_the_next_generation(paths, claimed, monkeypatch):
    monkeypatch.setattr(waiting, "REPORT", 60.0)
    log = EventLog(paths.events, "a")
    log.emit("state", state="running", step=4, reason="")
    write_failure(paths.failures, 0, Failure(1, "stage 0", "forward", 4, "lost", "gone"))
    record = RunRecord(paths.root)
    if claimed:  # a surviving rank is about to report
        assert claim_report(paths.failures, 0)
        threading.Timer(0.3, lambda: log.emit("state", state="failed", step=4, reason="by a rank")).start()
    settle(record)
    (failed,) = [event for event in record.events() if event.get("state") == "failed"]
    reason = "by a rank" if claimed else "rank 1 (stage 0) failed in forward of step 4: its process ended"
    assert failed["reason"] == reason
    settle(record)
    assert [event["state"] for event in record.events()] == ["queued", "running", "failed"]
    log.close()
