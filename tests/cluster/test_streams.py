"""Rank logs: rotated, never buffered, and the only place where a training thread's output goes."""

import os
import threading

import pytest

from mmlab.cluster.streams import EngineStream, RankLog


def test_a_log_is_rotated_and_its_oldest_part_dropped(tmp_path):
    log = RankLog(tmp_path / "rank-0.log", max_bytes=10, backups=2)
    for number in range(8):
        log.write(b"line %d\n" % number)
    log.close()
    parts = [(tmp_path / name).read_text() for name in ("rank-0.log.2", "rank-0.log.1", "rank-0.log")]
    assert parts == ["line 5\n", "line 6\n", "line 7\n"]
    assert len(list(tmp_path.iterdir())) == 3


def test_a_log_goes_on_where_the_last_generation_ended(tmp_path):
    for text in (b"one\n", b"two\n"):
        log = RankLog(tmp_path / "rank-0.log")
        log.write(text)
        log.close()
    assert (tmp_path / "rank-0.log").read_text() == "one\ntwo\n"


def test_what_a_thread_prints_after_the_end_goes_to_no_other_file(tmp_path):
    log = RankLog(tmp_path / "rank-0.log")
    log.close()
    with open(tmp_path / "checkpoint", "wb"):  # takes the number that the log's file had
        log.write(b"late\n")
    assert (tmp_path / "checkpoint").read_bytes() == b""


class Session:
    """Stands for the client's side of an engine's stream."""

    def __init__(self):
        self.sent = []

    def msg(self, kind, content, parent=None):
        return content

    def send(self, thread, message, ident=None):
        self.sent.append(message["text"])


@pytest.fixture
def stream(monkeypatch):
    """An engine's stdout over a file of its own."""
    import zmq
    from ipykernel.iostream import IOPubThread

    reader, writer = os.pipe()
    session = Session()
    context = zmq.Context()
    socket = context.socket(zmq.PUB)
    thread = IOPubThread(socket)  # not started: what is scheduled on it happens at once
    with os.fdopen(writer, "w") as file, monkeypatch.context() as patch:
        patch.setattr("sys.stdout", file)
        stream = EngineStream(session, thread, "stdout")
        patch.undo()
        yield stream, session, file
        stream.close()

    thread.io_loop.close()
    context.destroy(linger=0)
    os.close(reader)


def run_in_thread(function):
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(10)


def test_only_what_the_run_prints_goes_to_its_log(stream, tmp_path):
    stream, session, file = stream
    log = RankLog(tmp_path / "rank-0.log")
    go, done = threading.Event(), threading.Event()

    def of_a_cell():
        go.wait(10)
        stream.write("thread of a cell\n")
        done.set()

    threading.Thread(target=of_a_cell).start()
    stream.route(log)
    stream.write("cell\n")
    go.set()
    done.wait(10)
    run_in_thread(lambda: (stream.write("training\n"), stream.flush()))
    os.write(file.fileno(), b"from C++\n")
    stream.flush()
    while "C++" not in (tmp_path / "rank-0.log").read_text():
        pass
    stream.unroute()
    run_in_thread(lambda: (stream.write("after\n"), stream.flush()))
    assert (tmp_path / "rank-0.log").read_text() == "training\nfrom C++\n"
    assert "".join(session.sent) == "cell\nthread of a cell\nafter\n"
    log.close()


def test_a_full_disk_loses_what_is_printed_and_nothing_else(tmp_path):
    log = RankLog(tmp_path / "log")
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, log._file)
    os.close(full)
    log.write(b"lost")
    log.close()
