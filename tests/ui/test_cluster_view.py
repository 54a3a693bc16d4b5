"""The view of a lab: engines with their ranks, runs, closing; a lab as its keeper writes it down."""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from IPython.core.interactiveshell import InteractiveShell

from mmlab.cluster import registry
from mmlab.cluster.registry import LabPaths
from mmlab.lab import Lab, Run
from mmlab.magics import LabMagics, _in_rank_order
from mmlab.messages import EventLog, RunPaths, read_json, write_json
from mmlab.messages.runs import create_run
from mmlab.ui.lab_source import LabSource
from mmlab.ui.panels.cluster import Cluster
from mmlab.ui.part import Part
from ui.axe import serious
from ui.stage import Stage, browser_page
from ui.synthetic import SyntheticRun


@pytest.fixture
def lab(started: SyntheticRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """A lab on paper: this process is its keeper and its first engine; another engine is of another host."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    started.train(3)
    paths = LabPaths(registry.registry() / "abc123")
    for folder in (paths.root, paths.control, paths.clients):
        folder.mkdir(parents=True)
    _given_to(paths, started.paths, engines=[4, 9])
    config = registry.LabConfig("abc123", 3, "", None, 60.0, 60.0, "worker", time.time())
    registry.write_private(paths.config, asdict(config))
    me = registry.this_process()
    up = [
        {"engine": 4, "pid": os.getpid(), "host": socket.gethostname()},
        {"engine": 9, "pid": 7, "host": "a-host-with-a-very-long-name.example.org"},
    ]
    found = {"id": "abc123", "state": "starting", "engines": 3, "ready": 2, "job": "77", "reason": "", "keeper": me}
    registry.write_private(paths.state, found | {"up": up, "runs": [str(started.dir)], "processes": []})
    return Lab._of(paths)


def _given_to(paths: LabPaths, run: RunPaths, **more: object) -> None:
    """Write that a run is a lab's."""
    lab = {"root": str(paths.root), "host": socket.gethostname()}
    write_json(run.run, (read_json(run.run) or {}) | {"lab": lab} | more)


def test_the_run_at_work_is_meant_while_others_are_queued_behind_it(lab: Lab, started: SyntheticRun) -> None:
    """Until another lab has it."""
    queued = create_run(started.dir.parent, "branch", started.paths.plan.read_text(), 3, 9)
    dropped = create_run(started.dir.parent, "dropped", started.paths.plan.read_text(), 3, 9)
    for run in (queued, dropped):
        _given_to(lab._paths, run)
    log = EventLog(dropped.events)
    log.emit("state", state="stopped", step=0, reason="stopped before it started")
    runs = [str(run) for run in (started.dir, queued.root, dropped.root)]
    registry.write_private(lab._paths.state, lab.info() | {"runs": runs})
    magics = LabMagics(InteractiveShell())
    assert magics._run("", "").dir == started.dir
    found = magics._lab()
    assert found.run is not None
    assert found.run.dir == dropped.root
    assert [run.dir for run in found._busy_with()] == [started.dir, queued.root]
    assert _in_rank_order(found.current, SimpleNamespace(targets=[9, 4])) == [4, 9]
    source = LabSource(lab)
    source.look()
    assert [engine["rank"] for engine in source.engines] == [0, 1]
    registry.write_private(lab._paths.state, lab.info() | {"runs": runs[::2] + runs[1:2]})
    for state in ("stopped", "queued", "starting"):  # it is started again while another one is newer
        log.emit("state", state=state, step=0, reason="")
        source._looked = float("-inf")
        source.look()
        assert [row["state"] for row in source.runs] == ["running", state, "queued"]
    log.emit("state", state="stopped", step=0, reason="")
    log.close()
    registry.write_private(lab._paths.state, lab.info() | {"runs": runs})
    found.run = Run(started.dir)
    _given_to(LabPaths(lab._paths.root.with_name("other")), started.paths)
    assert found.current is not None
    assert found.current.dir == dropped.root
    assert [run.dir for run in found._busy_with()] == [queued.root]


def test_engines_are_told_with_their_ranks_and_runs(lab: Lab, started: SyntheticRun) -> None:
    source = LabSource(lab)
    source.look()
    panel = Cluster(source)
    frame = panel.frame()
    json.dumps(frame)
    assert (frame["state"], frame["ready"], frame["engines"], frame["job"]) == ("starting", 2, 3, "77")
    here, there = frame["rows"]
    assert (here["engine"], here["rank"], here["role"], here["alive"]) == (4, 0, "vision 0", True)
    assert here["memory"] > 1e6
    assert (there["rank"], there["alive"], there["memory"]) == (1, None, None)
    assert [(run["name"], run["state"], run["step"]) for run in frame["runs"]] == [(started.dir.name, "running", 3)]
    assert "lab abc123: starting, 2 of 3 engines, job 77" in panel.text()
    assert "a-host-with-a-very-long-name" in panel.html()
    with pytest.raises(ValueError, match="unknown request 'start'"):
        panel.handle("start", {})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_page_shows_a_lab_and_closes_it(lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(lab, "close", lambda: closed.append(lab.id))
    source = LabSource(lab)
    with browser_page(600, 900) as page:
        stage = Stage(page, Part(source, [Cluster(source)], "Engines and runs of a lab"))
        stage.until(lambda: "lab abc123: 2 of 3 engines ready, job 77" in page.locator(".mm-lab-line").inner_text())
        rows = page.locator(".mm-cluster table").first.locator("tbody tr")
        stage.until(lambda: rows.count() == 2)
        assert "vision 0" in rows.first.inner_text()
        assert serious(page) == []
        assert "another host" in rows.nth(1).inner_text()
        page.get_by_label("Engines in all").fill("2")
        page.get_by_role("button", name="Grow").click()
        stage.until(lambda: "has 3 engines, and a lab only grows" in page.locator(".mm-lab-said").inner_text())
        page.get_by_label("Engines in all").fill("")
        noted = {**lab.info(), "engines": 4}
        monkeypatch.setattr(
            registry, "ask", lambda paths, verb, n: registry.write_private(paths.state, noted | {"n": n})
        )
        page.get_by_role("button", name="Grow").click()  # one more
        stage.until(lambda: "starting engines until there are 4" in page.locator(".mm-lab-said").inner_text())
        assert lab.info()["n"] == 4
        stage.shot(tmp_path / "grow.png")
        page.get_by_role("button", name="Close").click()
        stage.pump()
        assert closed == []
        page.get_by_role("button", name="Really close").click()
        stage.until(lambda: "closed" in page.locator(".mm-lab-said").inner_text())
        assert closed == ["abc123"]
        stage.shot(tmp_path / "cluster.png")
        assert stage.errors == []
