"""Reading a run from its files alone: state, lineage, checkpoints, logs."""

import os
import subprocess
import sys
import threading

import pytest

from mmlab.errors import MmlabError, PlanError
from mmlab.messages import Beacon, EventLog, Failure, write_failure, write_json
from mmlab.messages.runs import create_run, runs_root
from mmlab.plan import Plan
from mmlab.tracking import RunRecord, list_runs, rare
from mmlab.ui.feed import Feed


@pytest.fixture
def paths(tmp_path):
    return create_run(tmp_path / "runs", "my run", 'name = "my run"\n', world_size=2, steps=10)


@pytest.fixture
def log(paths):
    log = EventLog(paths.events, "a")
    yield log
    log.close()


def beacon(paths, rank, role, generation=0, step=0):
    import socket

    made = Beacon(paths.ranks / f"rank-{rank}.beacon", rank, role, socket.gethostname(), generation)
    made.step = step
    made.update("forward")
    return made


def test_a_new_run_is_queued_and_its_inbox_is_private(paths):
    status = RunRecord(paths.root).status()
    assert (status["state"], status["step"], status["steps"], status["ranks"]) == ("queued", 0, 10, [])
    assert paths.control.stat().st_mode & 0o777 == 0o700
    assert paths.root.name.endswith("-my-run")


def test_two_runs_of_one_second_have_two_folders(tmp_path):
    made = {create_run(tmp_path, "x", "", 1, 1).root for _ in range(3)}
    assert len(made) == 3
    assert {record.paths.root for record in list_runs(tmp_path)} == made


def test_a_folder_that_cannot_be_written_is_a_plan_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PlanError, match="MMLAB_RUNS"):
        create_run(tmp_path / "file", "x", "", 1, 1)


def test_the_runs_folder_can_be_named(monkeypatch, tmp_path):
    monkeypatch.setenv("MMLAB_RUNS", str(tmp_path))
    assert runs_root() == tmp_path
    monkeypatch.delenv("MMLAB_RUNS")
    monkeypatch.chdir(tmp_path)
    assert runs_root() == tmp_path / "runs"


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(MmlabError, match=r"holds no run\.json"):
        RunRecord(tmp_path)


def test_a_running_run_shows_its_ranks(paths, log):
    first, second = beacon(paths, 0, "vision 0", step=3), beacon(paths, 1, "stage 0", step=3)
    log.emit("lineage", id="a", parent="", parent_step=0, step=0)
    log.emit("state", state="running", step=0, reason="")
    log.emit("step", step=2, loss=1.0)
    log.emit("command", verb="set", args={"values": {"train.steps": 20}}, ok=True, step=2)
    status = RunRecord(paths.root).status()
    assert (status["state"], status["step"], status["steps"], status["lineage"]) == ("running", 2, 20, "a")
    assert [(r["role"], r["pid"], r["alive"], r["phase"]) for r in status["ranks"]] == [
        ("vision 0", os.getpid(), True, "forward"),
        ("stage 0", os.getpid(), True, "forward"),
    ]
    first.close()
    second.close()


def test_what_is_told_of_a_run_is_of_one_generation(paths, log, monkeypatch):
    paths.plan.write_text(Plan.preset("quickstart").dumps())
    log.emit("state", state="running", step=0, reason="")
    ranks = [beacon(paths, 0, "vision 0", step=3), beacon(paths, 1, "stage 0", step=3)]
    record, feed = RunRecord(paths.root), Feed(paths.root)
    read = record.rare_events

    def next_generation_begins():
        """Between a look at the log and one at the ranks."""
        if len(ranks) == 2:
            log.emit("state", state="starting", step=0, reason="recovering")
            write_json(paths.run, record.info | {"generation": 1, "engines": [7, 8]})
            ranks.append(beacon(paths, 0, "vision 0", generation=1))

    monkeypatch.setattr(record, "rare_events", lambda: (read(), next_generation_begins())[0])
    feed.read()
    feed.look()
    status = record.status()
    engines = [(rank["rank"], rank["engine"]) for rank in status["ranks"]]
    assert (status["state"], status["generation"], engines) == ("starting", 1, [(0, 7)])
    feed.look()  # it has read what was before
    assert (feed.state, len(feed.ranks)) == ("running", 2)
    feed.read()
    feed.look()
    assert (feed.state, len(feed.ranks)) == ("starting", 1)
    for rank in ranks:
        rank.close()


def test_a_rank_whose_process_is_gone_makes_the_run_failed(paths, log):
    code = (
        "import os, socket, sys; from pathlib import Path; from mmlab.messages import Beacon;"
        "b = Beacon(Path(sys.argv[1]), 1, 'stage 0', socket.gethostname(), 0); b.step = 4;"
        "b.update('backward'); os._exit(0)"
    )
    log.emit("state", state="running", step=0, reason="")
    alive = beacon(paths, 0, "vision 0", step=4)
    subprocess.run([sys.executable, "-c", code, paths.ranks / "rank-1.beacon"], check=True)
    status = RunRecord(paths.root).status()
    assert status["state"] == "failed"
    assert status["reason"] == "rank 1 (stage 0) failed in backward of step 4: its process ended"
    assert [rank["alive"] for rank in status["ranks"]] == [True, False]
    alive.close()


def test_a_failure_record_makes_the_run_failed_before_the_event_comes(paths, log):
    log.emit("state", state="running", step=0, reason="")
    write_failure(paths.failures, 0, Failure(1, "stage 0", "reduce", 5, "peer", "connection closed"))
    write_failure(paths.failures, 0, Failure(0, "vision 0", "encode", 5, "memory", "out of memory"))
    assert RunRecord(paths.root).status()["reason"] == "rank 0 (vision 0) failed in encode of step 5: out of memory"


def test_a_run_whose_lab_ended_has_failed(tmp_path, monkeypatch):
    import socket

    keeper = {"pid": 2**22 - 1, "started": 1.0, "host": socket.gethostname()}
    paths = create_run(tmp_path, "x", "", 1, 1, keeper=keeper)
    status = RunRecord(paths.root).status()
    assert (status["state"], status["reason"]) == ("failed", "the lab that was running it has ended")
    log, record = EventLog(paths.events), RunRecord(paths.root)
    monkeypatch.setattr(record, "_lab_ended", lambda info: bool(log.emit("state", state="finished", step=1, reason="")))
    assert record.status()["state"] == "finished"  # both ended between the look at the log and that at the lab
    log.close()


def test_metrics_follow_the_lineage(paths, log):
    def steps(lineage, numbers):
        log.lineage = lineage
        for number in numbers:
            log.emit("step", step=number, loss=float(number), of=lineage)

    log.emit("lineage", id="a", parent="", parent_step=0, step=0)
    steps("a", [1, 2, 3, 4])
    log.emit("lineage", id="b", parent="a", parent_step=2, step=2)
    record = RunRecord(paths.root)
    assert record.status()["step"] == 2
    steps("b", [3, 4, 5])
    log.emit("lineage", id="c", parent="a", parent_step=3, step=3)
    steps("c", [4])
    assert [(row["step"], row["of"]) for row in record.metrics()] == [(1, "a"), (2, "a"), (3, "a"), (4, "c")]
    assert [(event["step"], event["of"]) for event in record.steps_back()] == [(4, "c"), (3, "a"), (2, "a"), (1, "a")]
    assert next(RunRecord(paths.root).steps_back())["step"] == 4
    assert record.status()["step"] == 4


def test_only_complete_checkpoints_count(paths):
    for name, step in (("late", 20), ("early", 10)):
        folder = paths.checkpoints / name
        folder.mkdir()
        files = {"a": {"size": 3, "sha256": ""}, "b": {"size": 4, "sha256": ""}}
        write_json(folder / "manifest.json", {"name": name, "step": step, "time": 1.0, "files": files})
    (paths.checkpoints / "half").mkdir()
    assert [(row["name"], row["bytes"]) for row in RunRecord(paths.root).checkpoints()] == [("early", 7), ("late", 7)]


def test_the_last_trace_that_all_ranks_have(paths):
    for rank, steps in ((0, (10, 20)), (1, (10,))):
        lines = [f'{{"step": {step}, "t0": 1.0, "ops": [["forward", 0, 0.0, 0.1]]}}\n' for step in steps]
        (paths.traces / f"rank-{rank}.jsonl").write_text("".join(lines))
    traces = RunRecord(paths.root).traces()
    assert {rank: trace["step"] for rank, trace in traces.items()} == {0: 10, 1: 10}
    assert RunRecord(paths.root).traces(20) == {}


def test_a_log_with_rotated_parts_and_followed(paths, log):
    path = paths.log(0)
    path.with_name("rank-0.log.1").write_text("one\n")
    path.write_text("two\n")
    record = RunRecord(paths.root)
    assert record.log(0) == "one\ntwo\n"
    assert record.log(0, lines=1) == "two\n"
    lines = []
    reader = threading.Thread(target=lambda: lines.extend(record.follow_log(0, poll=0.02)))
    reader.start()
    while not lines:
        pass
    path.rename(path.with_name("rank-0.log.1"))
    path.write_text("three\n")
    while len(lines) < 2:
        pass
    log.emit("state", state="finished", step=3, reason="")
    reader.join(10)
    assert lines == ["two\n", "three\n"]


def test_a_rank_that_only_lost_a_peer_is_not_blamed_at_once(paths, log):
    import time

    log.emit("state", state="running", step=0, reason="")
    soon = time.time() + 60  # as if it came just now, however long this test may be held up
    write_failure(paths.failures, 0, Failure(1, "stage 0", "reduce", 5, "peer", "connection closed", time=soon))
    record = RunRecord(paths.root)
    assert record.status()["state"] == "running"
    write_failure(paths.failures, 0, Failure(1, "stage 0", "reduce", 5, "peer", "closed", time=time.time() - 5))
    assert record.status()["reason"] == "rank 1 (stage 0) failed in reduce of step 5: closed"


def test_a_run_that_is_being_stopped_says_so(paths, log):
    from mmlab.messages import Ack, Inbox, new_command, send

    record = RunRecord(paths.root)
    log.emit("state", state="running", step=0, reason="")
    assert not record.stopping()
    command = new_command("stop")
    send(paths.control, command)
    assert record.stopping()
    Inbox(paths.control).answer(Ack(command.id, True, 1, [0]))
    log.emit("command", verb="stop", args={}, ok=True, step=1)
    assert record.stopping()
    log.emit("state", state="stopped", step=1, reason="")
    assert not record.stopping()


def test_a_run_whose_ranks_left_without_a_word_has_failed(paths, log, monkeypatch):
    from mmlab.messages import Beacon, beacon

    log.emit("state", state="running", step=0, reason="")
    for rank in range(2):
        Beacon(paths.ranks / f"rank-{rank}.beacon", rank, "stage 0", "here", 0).close()
    record = RunRecord(paths.root)
    monkeypatch.setattr(beacon, "LEFT", 600.0)
    assert record.status()["state"] == "running"  # the last event may be on its way
    monkeypatch.setattr(beacon, "LEFT", -1.0)
    assert record.status()["state"] == "failed"
    log.emit("state", state="finished", step=3, reason="")
    assert record.status()["state"] == "finished"


def test_a_line_cut_short_costs_no_other_event(paths, log):
    log.emit("state", state="running", step=0, reason="")
    with open(paths.events, "ab") as file:
        file.write(b'{"t": 1, "kind": "ste')
    EventLog(paths.events).emit("state", state="failed", step=1, reason="disk full")
    assert [event["state"] for event in RunRecord(paths.root).events()][-2:] == ["running", "failed"]


def test_what_is_no_event_is_passed_over_and_texts_can_be_shown(paths, log):
    junk = [b"\xff\xfe", b"[" * 100_000, b"{}", b'{"t": 1}', b'{"kind": "step"}', b'{"t": NaN, "kind": "step"}', b"7"]
    junk += [b'{"t": "x", "kind": "state", "state": "failed"}', b'{"t": 1, "kind": ["state"]}']
    kinds = ("state", "step", "lineage", "command", "restore", "relayout", "checkpoint")
    junk += [b'{"t": 1, "kind": "%s", "lineage": "a"}' % kind.encode() for kind in kinds]
    with open(paths.events, "ab") as file:
        file.write(b"\n".join(junk) + b"\n")
    log.emit("command", step=0, verb="pause", args={}, ok=True, message="half \ud800 of \U0001f600")
    assert [event["kind"] for event in RunRecord(paths.root).events()][-1:] == ["command"]
    assert len(RunRecord(paths.root).events()) == len(paths.events.read_bytes().splitlines()) - len(junk)
    assert RunRecord(paths.root).events()[-1]["message"] == "half \ufffd of \U0001f600"


def test_restoring_means_the_newest_checkpoint_or_the_current_lineages(paths, log):
    def save(name, step, lineage, when):
        (paths.checkpoints / name).mkdir()
        manifest = {"name": name, "step": step, "lineage": lineage, "time": when, "files": {}}
        write_json(paths.checkpoints / name / "manifest.json", manifest)

    for lineage, parent in (("a", ""), ("b", "a"), ("c", "a")):
        log.emit("lineage", id=lineage, parent=parent, parent_step=10, step=10)
    save("a10", 10, "a", 1.0)
    save("a100", 100, "a", 2.0)
    save("b10", 10, "b", 3.0)
    save("c20", 20, "c", 4.0)
    record = RunRecord(paths.root)
    assert record.find_checkpoint()["name"] == "c20"
    assert record.find_checkpoint(step=10)["name"] == "a10"
    assert record.find_checkpoint(name="b10")["name"] == "b10"


def test_a_followed_log_gives_whole_lines(paths, log):
    log.emit("state", state="finished", step=1, reason="")
    paths.log(0).write_text("one\nend")
    assert list(RunRecord(paths.root).follow_log(0)) == ["one\n", "end"]
    lines = []
    log.emit("state", state="running", step=1, reason="")
    reader = threading.Thread(target=lambda: lines.extend(RunRecord(paths.root).follow_log(0, poll=0.01)))
    reader.start()
    while not lines:
        pass
    with open(paths.log(0), "a") as file:
        file.write(" of it\n")
    log.emit("state", state="finished", step=1, reason="")
    reader.join(10)
    assert lines == ["one\n", "end of it\n"]
    paths.log(0).write_bytes(b"\r 10%\r 90%\r\nover\r")
    assert list(RunRecord(paths.root).follow_log(0)) == ["\n", " 10%\n", " 90%\n", "over\r"]  # as a bar moves


def test_an_answer_is_not_waited_for_when_the_run_has_ended(paths, log):
    from mmlab.messages import new_command, send
    from mmlab.tracking.sent import Sent

    command = new_command("pause")
    send(paths.control, command)
    log.emit("state", state="failed", step=1, reason="")
    with pytest.raises(MmlabError, match="the run has ended"):
        Sent("pause", command.id, paths.control).wait(60.0)
    log.emit("command", step=1, verb="pause", id=command.id, args={}, ok=True, ranks=[0, 1], message="paused")
    ack = Sent("pause", command.id, paths.control).wait(60.0)  # by the log, before the answer or without one
    assert (ack.ok, ack.step, ack.ranks, ack.message) == (True, 1, [0, 1], "paused")


def test_garbage_in_the_inbox_and_damaged_manifests_are_passed_over(paths, log):
    (paths.control / "list.json").write_text("[1]")
    os.mkfifo(paths.control / "pipe.json")
    for name, text in (("empty", "{}"), ("list", "[1]"), ("cut", '{"step": 1')):
        (paths.checkpoints / name).mkdir()
        (paths.checkpoints / name / "manifest.json").write_text(text)
    (paths.checkpoints / "good").mkdir()
    write_json(paths.checkpoints / "good" / "manifest.json", {"name": "good", "step": 3, "time": 1.0, "lineage": "a"})
    record = RunRecord(paths.root)
    assert not record.stopping()
    assert [row["name"] for row in record.checkpoints()] == ["good"]


def test_a_run_whose_folder_cannot_be_written_does_not_start(paths, log):
    from mmlab.tracking.waiting import next_generation

    record = RunRecord(paths.root)
    assert next_generation(record, {"root": "lab", "host": "here"}) == 1
    paths.events.unlink()
    paths.events.mkdir()
    with pytest.raises(MmlabError, match="cannot be written"):
        next_generation(record, {"root": "lab", "host": "here"})


def test_steps_are_counted_without_being_kept(paths, log, monkeypatch):
    monkeypatch.setattr(rare, "READ", 200)
    log.emit("lineage", id="a", parent="", parent_step=0, step=0)
    for step in range(1, 30):
        log.emit("step", step=step, loss=1.0 / step)
    log.emit("eval", step=29, loss=1.0)
    record = RunRecord(paths.root)
    assert [event["kind"] for event in record.rare_events()] == ["state", "lineage", "eval"]
    assert (record.last_steps(), record.status()["step"], record.last_step()["loss"]) == ({"a": 29}, 29, 1.0 / 29)
    with open(paths.events, "a") as file:
        file.write('{"kind": "step", "lineage": "b", "step": 7, "t": 1.0}\n{"kind": "eval", "cut')
    assert record.last_steps() == {"a": 29, "b": 7}
    log.emit("warning", step=29, message="after a cut line")
    assert record.last_step()["step"] == 7


def test_events_are_read_once_from_whatever_thread(paths, log):
    record = RunRecord(paths.root)
    for step in range(200):
        log.emit("step", step=step, loss=1.0)
    threads = [threading.Thread(target=record.events) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(record.events()) == 201
