"""Saves without a model around them: complete or as if never begun, wherever processes end or disks are full."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import saving_functions
import torch

from mmlab.errors import CheckpointError, DamagedError
from mmlab.messages.checkpoints import FROZEN, MANIFEST, newest_first
from mmlab.messages.locations import Location
from mmlab.tracking.checkpoints import write_manifest
from mmlab.train.checkpoint.catalog import Retention, candidates, find, parts, read_manifest
from mmlab.train.checkpoint.state import Staging


def saved(folder, step, **about):
    made = saving_functions.save(None, 0, 1, folder, step, **about)
    assert made.problem is None
    return made


def names(folder):
    return sorted(p.name for p in Path(folder).iterdir() if p.name != FROZEN)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3])
def test_a_kill_at_any_moment_on_any_rank_leaves_the_checkpoint_before(tmp_path, ranks):
    command = [sys.executable, saving_functions.__file__, str(tmp_path), str(ranks)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True)
    found = json.loads(done.stdout)
    assert len(found) == 4 * ranks + 2
    for phase, victim, newest, removed, whole in found:
        complete = phase in ("save: complete", "save: prune")
        assert newest == ("step-2" if complete else "step-1"), (phase, victim)
        assert whole, (phase, victim)
        if phase in ("save: written", "save: manifest") or (phase == "save: write" and newest == "step-1"):
            assert removed == ["step-2"], (phase, victim, removed)


@pytest.mark.slow
@pytest.mark.parametrize("at_rank", [0, 2])
def test_a_disk_that_takes_no_more_costs_that_save_alone(pool, tmp_path, at_rank):
    pool.grow(3)
    found = pool.run(saving_functions.limited, str(tmp_path), at_rank, 2000, ranks=3)
    for problem, after, left, frozen in found:
        assert f"rank {at_rank}: [Errno 27] File too large" in problem
        assert after is None
        assert left == [FROZEN, "step-1", "step-3"]
        assert len(frozen) == 1


def test_a_disk_without_room_is_not_filled(tmp_path, monkeypatch):
    monkeypatch.setattr(Location, "room", lambda self: 1000)
    made = saving_functions.save(None, 0, 1, tmp_path, 1)
    assert isinstance(made.problem, CheckpointError)
    assert "MB free" in str(made.problem)
    assert names(tmp_path) == []


@pytest.mark.parametrize("address", ["{folder}", "file://{folder}", "memory://checkpoints{folder}"])
def test_checkpoints_lie_wherever_fsspec_reaches(tmp_path, address):
    where = Location(address.format(folder=tmp_path))
    for step in (1, 2, 3):
        saved(where.address, step)
    assert [folder.name for folder in candidates(where)] == ["step-3", "step-2", "step-1"]
    assert saving_functions.whole(find(where, step=2), 1)
    assert Retention(where).prune(1, 2) == ["step-1"]  # step 2 is a second one
    (where / "step-4").make()
    (where / "step-4").write("__0_0.distcp", b"cut short")
    assert Retention(where).clean() == ["step-4"]
    assert [folder.name for folder in where.folders() if folder.name != FROZEN] == ["step-2", "step-3"]


def test_one_that_takes_the_place_of_another_does_so_when_it_is_complete(tmp_path):
    saved(tmp_path, 1, name="best", periodic=False)
    saved(tmp_path, 2, name="best", periodic=False)
    assert names(tmp_path) == ["best", "best~2"]
    assert read_manifest(find(Location(tmp_path), name="best"))["step"] == 2
    assert Retention(Location(tmp_path)).prune(0, 0) == ["best"]
    saved(tmp_path, 3, name="best", periodic=False)
    assert Retention(Location(tmp_path)).prune(0, 0) == ["best~2"]
    assert read_manifest(find(Location(tmp_path), name="best"))["step"] == 3


def test_what_is_frozen_lies_once_and_as_long_as_it_is_referred_to(tmp_path):
    where = Location(tmp_path)
    for step in (1, 2):
        saved(tmp_path, step)
    (frozen,) = (where / FROZEN).folders()
    sizes = [read_manifest(where / f"step-{step}")["bytes"] for step in (1, 2)]
    assert sizes[0] == sizes[1] > 0
    assert read_manifest(frozen)["bytes"] > 0
    Retention(where).prune(1, 0)
    assert names(tmp_path) == ["step-2"]
    assert saving_functions.whole(where / "step-2", 1)
    (where / "step-2").remove()
    saved(tmp_path, 3, name="whole")
    manifest = json.loads((tmp_path / "whole" / MANIFEST).read_text())
    (tmp_path / "whole" / MANIFEST).write_text(json.dumps({**manifest, "frozen": {}, "seal": ""}))
    Retention(where).prune(1, 0)
    assert (where / FROZEN).folders() == []


def test_a_frozen_part_that_is_damaged_is_written_again(tmp_path):
    saved(tmp_path, 1)
    (frozen,) = (tmp_path / FROZEN).iterdir()
    data = next(frozen.glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    saved(tmp_path, 2)
    assert saving_functions.whole(Location(tmp_path) / "step-2", 1)
    with pytest.raises(DamagedError, match="refers to the frozen vision"):
        parts(Location(tmp_path) / "step-1", read_manifest(tmp_path / "step-1"))


def test_the_newest_good_checkpoint_is_never_removed(tmp_path):
    for step in (1, 2, 3):
        saved(tmp_path, step)
    for step in (2, 3):
        data = next((tmp_path / f"step-{step}").glob("*.distcp"))
        content = bytearray(data.read_bytes())
        content[-9] ^= 1
        data.write_bytes(content)
    retention = Retention(Location(tmp_path))
    assert retention.prune(1, 0) == ["step-2"]
    assert names(tmp_path) == ["step-1", "step-3"]
    saved(tmp_path, 4)
    assert retention.prune(1, 0) == ["step-1", "step-3"]


def test_somebodys_own_folder_is_left_alone(tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.txt").write_text("keep")
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / ".metadata.tmp").write_bytes(b"")
    assert Retention(Location(tmp_path)).clean() == ["cut"]
    assert names(tmp_path) == ["notes"]


def test_bad_checkpoints_are_told_apart(tmp_path):
    for step in (1, 2):
        saved(tmp_path, step)
    one, two = Location(tmp_path) / "step-1", Location(tmp_path) / "step-2"
    manifest = read_manifest(one)
    (tmp_path / "step-1" / MANIFEST).write_text(json.dumps({**manifest, "step": 9}))
    with pytest.raises(DamagedError, match=r"manifest\.json is not what was written"):
        read_manifest(one)
    (tmp_path / "step-1" / MANIFEST).write_text(json.dumps({"format": 3, "files": {}}))
    with pytest.raises(CheckpointError, match="newer mmlab") as caught:
        read_manifest(one)
    assert not isinstance(caught.value, DamagedError)  # an older one would not do
    mixed = two.checksum("__0_0.distcp")
    (tmp_path / "step-1" / MANIFEST).write_text(json.dumps(manifest))
    os.replace(tmp_path / "step-1" / "__0_0.distcp", tmp_path / "step-2" / "__0_0.distcp")
    assert two.checksum("__0_0.distcp") != mixed
    assert not Retention(Location(tmp_path)).good((two, read_manifest(two)))
    with pytest.raises(DamagedError, match=r"__0_0\.distcp is missing"):
        read_manifest(one)
    with pytest.raises(CheckpointError, match="there are: step-1"):
        find(Location(tmp_path), step=7)
    with pytest.raises(CheckpointError, match="cannot be"):
        find(Location("nowhere://at/all"))


def test_a_run_goes_on_from_its_own_lineage(tmp_path):
    """Restored to step 1, then lost: not from step 2 of the lineage that was left, though it was saved later."""
    saved(tmp_path, 1)
    saved(tmp_path, 2)
    events = [
        {"kind": "lineage", "id": "a", "parent": "", "parent_step": 0},
        {"kind": "lineage", "id": "b", "parent": "a", "parent_step": 1},
    ]
    assert [folder.name for folder in candidates(Location(tmp_path), events=events)] == ["step-1", "step-2"]
    assert newest_first([], events) == []
    assert candidates(Location(tmp_path))[0].name == "step-2"


def test_memory_is_used_again_by_the_next_copy():
    staging = Staging(torch.device("cpu"))
    state = {"a": torch.arange(6.0).view(2, 3), "b": torch.arange(4)}
    first = staging.copy(state)
    assert all(torch.equal(first[key], state[key]) for key in state)
    address = first["a"].data_ptr()
    state["a"].add_(1.0)
    assert not torch.equal(first["a"], state["a"])
    second = staging.copy({"a": state["a"]})
    assert second["a"].data_ptr() == address
    assert second.keys() == {"a"}
    assert torch.equal(second["a"], state["a"])


def test_one_that_was_given_a_name_meanwhile_is_kept(tmp_path, monkeypatch):
    """Between the look and the removal lies the time in which checksums are read."""
    for step in (1, 2):
        saved(tmp_path, step)
    retention, one = Retention(Location(tmp_path)), Location(tmp_path) / "step-1"

    def named(found):
        monkeypatch.undo()
        write_manifest(one, read_manifest(one) | {"given": "mine", "periodic": False})
        return True

    monkeypatch.setattr(retention, "good", named)
    assert retention.prune(1, 0) == []
    assert saving_functions.whole(find(tmp_path, name="mine"), 1)
    assert retention.prune(1, 0) == []


def test_a_name_that_was_given_is_found_and_the_old_one_is_free(tmp_path):
    saved(tmp_path, 1, name="best", periodic=False)
    write_manifest(Location(tmp_path) / "best", read_manifest(tmp_path / "best") | {"given": "first"})
    saved(tmp_path, 2, name="best", periodic=False)
    assert Retention(Location(tmp_path)).prune(0, 0) == []
    assert read_manifest(find(tmp_path, name="best"))["step"] == 2
    assert read_manifest(find(tmp_path, name="first"))["step"] == 1


def test_names_that_were_swapped_mean_what_they_say(tmp_path):
    """Folders keep their names: the newer one's is the older one's name now."""
    for step in (1, 2):
        saved(tmp_path, step)
    for step, given in ((1, "step-2"), (2, "step-1")):
        folder = Location(tmp_path) / f"step-{step}"
        write_manifest(folder, read_manifest(folder) | {"given": given})
    assert read_manifest(find(tmp_path, name="step-2"))["step"] == 1
    assert read_manifest(find(tmp_path, name="step-1"))["step"] == 2
