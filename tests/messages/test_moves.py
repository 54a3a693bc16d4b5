"""A state on its way between two generations that nobody took up."""

import errno
import shutil
import socket

import pytest

from mmlab.messages import RunPaths, read_json, write_json
from mmlab.messages.checkpoints import location_of, manifests
from mmlab.messages.moves import (
    Move,
    NotRescued,
    forget_move,
    memory_folders,
    memory_with_room,
    read_move,
    rescue_move,
    save_move,
    write_move,
)


@pytest.fixture
def paths(tmp_path):
    paths = RunPaths(tmp_path / "run")
    paths.create()
    yield paths
    forget_move(paths)


def left(paths, folder, **more):
    """A state in a folder, with the record that it is whole."""
    folder.mkdir(parents=True)
    write_json(folder / "manifest.json", {"name": folder.name})
    (folder / "part").write_bytes(b"weights")
    fields = {"generation": 2, "command": "", "name": folder.name, "folder": str(folder), "host": socket.gethostname(),
              "memory": True, "step": 5, "plan": "", "before": 3, "after": 2, "began": 0.0, "bytes": 7,
              "changes": {"parallel.tp": [1, 2]}} | more  # fmt: skip
    move = Move(**fields)
    write_move(paths, move)
    return move


def in_memory(paths):
    folders = memory_folders(paths)
    if not folders:
        pytest.skip("this host has no tmpfs")
    return folders[0]


def test_a_state_in_memory_becomes_a_checkpoint_and_leaves_the_memory(paths):
    folder = in_memory(paths)
    move = left(paths, folder / "relayout-step-5")
    assert read_move(paths) == move
    assert move.reason == "another layout (3 -> 2 ranks): parallel.tp 1 -> 2"
    assert rescue_move(paths) == move.name
    assert (paths.checkpoints / move.name / "part").read_bytes() == b"weights"
    assert not folder.exists()
    assert read_move(paths) is None
    assert rescue_move(paths) == ""


def test_a_state_on_disk_is_a_checkpoint_already(paths):
    move = left(paths, paths.checkpoints / "relayout-step-5", memory=False)
    assert rescue_move(paths) == move.name
    assert read_json(paths.checkpoints / move.name / "manifest.json") == {"name": move.name}


@pytest.mark.parametrize("address", ["{}", "file://{}", "memory://{}"])
@pytest.mark.parametrize("memory", [True, False])
def test_a_state_is_brought_to_where_the_plan_keeps_checkpoints(paths, tmp_path, address, memory):
    location = address.format(tmp_path / "elsewhere")
    paths.plan.write_text(f'[checkpoint]\nlocation = "{location}"\n')
    folder = in_memory(paths) if memory else paths.checkpoints
    move = left(paths, folder / "relayout-step-5", memory=memory)
    assert rescue_move(paths) == move.name
    ((found, manifest),) = manifests(location_of(paths, location), ("name",))
    assert (found.name, manifest["name"], found.read("part")) == (move.name, move.name, b"weights")
    assert not (folder / move.name).exists()


def test_a_state_that_was_brought_there_is_found_there(paths, tmp_path):
    """Its move is there until the next generation has its number: that looks for it again."""
    paths.plan.write_text(f'[checkpoint]\nlocation = "{tmp_path / "elsewhere"}"\n')
    move = left(paths, paths.checkpoints / "relayout-step-5", memory=False)
    assert save_move(paths) == save_move(paths) == rescue_move(paths) == move.name
    assert read_move(paths) is None


def test_what_a_save_that_was_cut_short_left_in_memory_is_removed(paths):
    folder = in_memory(paths)
    (folder / "relayout-step-5").mkdir(parents=True)
    assert rescue_move(paths) == ""
    assert not folder.exists()


@pytest.mark.parametrize("gone", ["state", "manifest", "host"])
def test_what_is_gone_is_forgotten(paths, gone):
    folder = in_memory(paths)
    move = left(paths, folder / "relayout-step-5", **({"host": "elsewhere"} if gone == "host" else {}))
    if gone == "state":
        shutil.rmtree(folder)
    if gone == "manifest":
        (folder / move.name / "manifest.json").unlink()
    assert rescue_move(paths) == ""
    assert read_move(paths) is None
    assert not list(paths.checkpoints.iterdir())


def test_a_full_disk_leaves_the_state_where_it_is(paths, monkeypatch):
    folder = in_memory(paths)
    move = left(paths, folder / "relayout-step-5")

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shutil, "copytree", full)
    with pytest.raises(NotRescued, match=r"state of step 5 cannot be kept at .*relayout-step-5: No space"):
        rescue_move(paths)
    assert read_move(paths) == move
    assert (folder / move.name / "part").is_file()


def test_memory_without_room_is_not_taken(paths):
    in_memory(paths)
    assert memory_with_room(paths, 1) is not None
    assert memory_with_room(paths, 1 << 60) is None
