"""What the routes look at, without a server."""

from pathlib import Path
from typing import Any

import pytest
from ui.synthetic import SyntheticRun

from mmlab.messages.files import read_json, write_json
from mmlab.server import desk, folders
from mmlab.server.desk import FEEDS, Desk


def test_runs_whose_processes_are_gone_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their logs do not say that they have ended, and there may be more of them than are followed."""
    monkeypatch.setenv("MMLAB_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(desk, "FRESH", -1.0)
    runs = [SyntheticRun(tmp_path / "runs", name=f"gone-{number}") for number in range(FEEDS + 2)]
    for run in runs:
        run.start()
        run.train(1)
        run.kill(0)
    found = Desk(tmp_path)
    first = found.overview()["runs"]
    assert [(one["state"], one["step"]) for one in first] == [("failed", 1)] * len(runs)
    read: list[Any] = []
    followed = desk.Followed.__init__
    monkeypatch.setattr(desk.Followed, "__init__", lambda self, root: (read.append(root), followed(self, root))[1])
    assert found.overview()["runs"] == first
    assert read == []
    runs[0].events.emit("state", state="queued", step=1, reason="")  # it is started again
    runs[0].live_here(0)
    again = {one["id"]: one["state"] for one in found.overview()["runs"]}
    assert again.pop(runs[0].dir.name) == "queued"
    assert set(again.values()) == {"failed"}
    for run in runs:
        run.close()


def test_a_long_log_is_read_a_slice_at_a_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other pages wait for a look; where the run is stands at the end of its log."""
    monkeypatch.setenv("MMLAB_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(desk, "SLICE", 0.0)
    run = SyntheticRun(tmp_path / "runs", name="long")
    run.start()
    run.train(1500)
    run.live_here(0)
    found = Desk(tmp_path)
    (key,) = (one["key"] for one in found.overview()["runs"])
    curves = []
    while not curves or curves[-1][-1][0] < 1500:
        seen = found.run(key)
        assert (seen["state"], seen["step"]) == ("running", 1500)
        curves.append(seen["curve"])
    assert len(curves) > 2
    run.close()


def test_a_damaged_folder_hides_no_other_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MMLAB_RUNS", str(tmp_path / "runs"))
    runs = [SyntheticRun(tmp_path / "runs", name=name) for name in ("whole", "damaged", "listless")]
    for run in runs:
        run.start()
        run.train(1)
    (tmp_path / "runs" / "no-run").mkdir()
    (tmp_path / "runs" / "no-run" / "run.json").write_text("[1]")
    runs[1].paths.run.write_text('{"created": 9e9, "lab": "x", "engines": 3, "steps": []}')
    with open(runs[2].paths.events, "a") as file:
        file.write('{"t": 1.0, "kind": "step", "lineage": "a", "step": 2, "loss": [], "seconds": "x"}\n')
    found = {one["id"]: one["state"] for one in Desk(tmp_path).overview()["runs"]}
    assert found == {runs[0].dir.name: "running", runs[1].dir.name: "unreadable", runs[2].dir.name: "unreadable"}
    for run in runs:
        run.close()


def test_runs_of_labs_are_listed_however_old_and_links_out_of_the_root_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MMLAB_RUNS", str(tmp_path / "none"))
    monkeypatch.setattr(folders, "NEWEST", 2)
    root = tmp_path / "root"
    runs = [SyntheticRun(root / "runs", name=f"run-{number}") for number in range(4)]
    outside = SyntheticRun(tmp_path / "outside")
    (root / "runs" / "link").symlink_to(outside.dir)
    found = folders.RunFolders(root)
    newest = [f"runs/{run.dir.name}" for run in runs[::-1]]
    assert [key for key, _ in found.newest()] == newest[:2]
    assert [key for key, _ in found.newest([newest[3], "runs/link", "runs/none"])] == [*newest[:2], newest[3]]
    write_json(runs[0].paths.run, (read_json(runs[0].paths.run) or {}) | {"created": 9e9})
    assert [key for key, _ in found.newest()] == [newest[3], newest[0]]
    for run in (*runs, outside):
        run.close()


def test_a_root_that_vanishes_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    found = Desk(tmp_path / "gone").overview()
    assert (found["labs"], found["runs"]) == ([], [])
    assert found["problem"] == f"the folder of this server is gone: {tmp_path / 'gone'}"
