"""Whatever lies in the inbox, the run goes on: what is no command is refused and taken out of the way."""

import json
import os

import pytest

from mmlab.messages import Ack, Inbox, new_command, read_ack, send
from mmlab.messages.control import read_command


@pytest.fixture
def control(tmp_path):
    folder = tmp_path / "control"
    folder.mkdir()
    return folder


GARBAGE = {
    "binary": b"\xff\x00\x8f",
    "empty": b"",
    "list": b"[1]",
    "nested without end": b"[" * 100_000,
    "huge": b" " * (2 << 20),
    "no time": b'{"id": "no time", "verb": "pause", "time": "now"}',
    "of another name": b'{"id": "x", "verb": "pause"}',
    "with args that are no table": b'{"id": "with args that are no table", "verb": "pause", "args": 3}',
    "unknown": b'{"id": "unknown", "verb": "explode"}',
}


@pytest.mark.parametrize("name", GARBAGE)
def test_a_file_that_is_no_command_is_refused_and_removed(control, name):
    (control / f"{name}.json").write_bytes(GARBAGE[name])
    good = new_command("pause")
    send(control, good)
    assert Inbox(control).pending() == [good]
    assert not (control / f"{name}.json").exists()
    ack = read_ack(control, name)
    assert ack is not None
    assert not ack.ok
    assert f"{name}.json" in ack.message


def test_what_somebody_else_answers_meanwhile_is_not_refused(control, monkeypatch):
    command = new_command("abort")
    send(control, command)

    def answered(path):
        Inbox(control).answer(Ack(command.id, True, 3, [1]))
        return read_command(path)

    monkeypatch.setattr("mmlab.messages.control.read_command", answered)
    assert Inbox(control).pending() == []
    assert read_ack(control, command.id).ok


def test_what_cannot_be_read_or_answered_is_put_aside(control):
    (control / "folder.json").mkdir()
    (control / "folder.json" / "kept").write_text("not ours")
    os.mkfifo(control / "pipe.json")  # reading it would never return
    (control / "nowhere.json").symlink_to(control / "nothing")
    (control / ("n" * 250 + ".json")).write_text(json.dumps({}))  # no room for the answer's name
    good = new_command("stop")
    send(control, good)
    inbox = Inbox(control)
    assert inbox.pending() == [good]
    assert [path.name for path in control.glob("*.json")] == [f"{good.id}.json"]
    (aside,) = control.glob("folder.refused-*")
    assert (aside / "kept").read_text() == "not ours"
