"""What views cost: bytes for each step, and what a saved notebook holds."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import nbformat
import pytest
from ipywidgets import Widget

from mmlab.lab import Run
from mmlab.plan import Plan
from mmlab.ui import part as parts
from mmlab.ui.dashboard import PARTS, Dashboard, part
from mmlab.ui.panels.charts import CHARTS
from mmlab.ui.panels.phases import Phases
from mmlab.ui.part import Part
from mmlab.ui.shell import Faces
from mmlab.ui.source import RunSource
from mmlab.ui.view import View, code
from ui.synthetic import InboxRun, SyntheticRun

NOTEBOOK = 270_000
"""Bytes that a notebook of a finished run has at most: 30,000 below what was promised, to grow in."""
STEP = 1_000
"""Bytes that an appended step sends at most."""


class Wire:
    """Counts what views send, as JSON and buffers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        monkeypatch.setattr(View, "send", lambda _, content, buffers=(): self.take(content, buffers))

    def take(self, content: Any, buffers: Any) -> None:
        self.sizes.append(len(json.dumps(content, separators=(",", ":")).encode()) + sum(map(len, buffers)))


def feed(made: Part) -> None:
    """One turn of a part's thread."""
    made.source._looked = float("-inf")  # type: ignore[attr-defined]
    made._frames = {name: (float("-inf"), frame) for name, (_, frame) in made._frames.items()}  # all panels are due
    made._look()
    made._send()


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts whose threads do nothing: the test takes their turns."""
    monkeypatch.setattr(Part, "_work", lambda _: None)


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize(("shown", "most"), [(["loss", "throughput"], 150), (list(CHARTS), STEP)])
def test_a_step_sends_little_to_charts(
    started: SyntheticRun, monkeypatch: pytest.MonkeyPatch, shown: list[str], most: int
) -> None:
    wire = Wire(monkeypatch)
    charts = part(RunSource(InboxRun(started.dir), started.dir), "charts")
    charts.panels["charts"].set(shown=shown)  # type: ignore[attr-defined]
    started.train(20)
    assert charts.view
    feed(charts)
    for _ in range(5):
        started.train(1)
        feed(charts)
    assert len(wire.sizes) == 6
    assert max(wire.sizes[1:]) < most
    charts.close()


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("ranks", [6, 16])
def test_a_step_sends_little_to_the_whole_dashboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    plan = Plan.preset("quickstart").with_("train.steps=2000")
    run = SyntheticRun(tmp_path, plan if ranks == 6 else plan.with_("parallel.dp=3", "parallel.vision_dp=4"))
    assert len(run.places) == ranks
    run.start()
    wire = Wire(monkeypatch)
    dashboard = Dashboard(InboxRun(run.dir), run.dir)
    run.train(120)
    for index in range(40):
        run.events.emit("warning", step=run.step, message=f"something to be listed, number {index}")
    assert dashboard.view
    feed(dashboard)
    sizes = []
    for _ in range(5):
        run.train(1)
        wire.sizes.clear()
        feed(dashboard)
        sizes += wire.sizes
    assert len(sizes) == 5
    assert max(sizes) < STEP, sizes
    run.events.emit("warning", step=run.step, message="one more")
    wire.sizes.clear()
    feed(dashboard)
    assert max(wire.sizes) < STEP
    dashboard.close()
    run.close()


def test_a_saved_notebook_of_a_finished_run_is_small_and_shows_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = SyntheticRun(tmp_path, Plan.preset("quickstart").with_("train.steps=500"))
    run.start()
    run.train(250)
    run.evaluate()
    outputs: dict[str, dict[str, Any]] = {}
    monkeypatch.setattr(
        parts, "publish", lambda data, metadata, display_id, update=False: outputs.update({display_id: data})
    )
    faces = Faces()
    opened = Run(run.dir)
    faces.show(opened)
    shown = [faces._parts[(run.dir, "dashboard")]]
    for name in list(PARTS)[:6]:
        one = faces.part(opened, name)
        one.show()
        shown.append(one)
    run.train(250)
    run.evaluate()
    run.finish()
    for one in shown:
        one.source._looked = float("-inf")  # type: ignore[attr-defined]
        one._look()
        one._renew()
    notebook = nbformat.v4.new_notebook()
    for data in outputs.values():
        output = nbformat.v4.new_output("display_data", data=data)
        notebook.cells.append(nbformat.v4.new_code_cell("run", outputs=[output]))
    live = [one.view for one in shown if not one.over]
    state = Widget.get_manager_state(drop_defaults=True, widgets=widgets_of([code(), *live]))
    notebook.metadata["widgets"] = {"application/vnd.jupyter.widget-state+json": state}
    nbformat.validate(notebook)
    saved = nbformat.writes(notebook)
    assert "finished, step 500" in outputs[next(iter(outputs))]["text/plain"]
    assert "image/png" in outputs[next(iter(outputs))]
    assert all({"text/html", "image/png"} & set(data) for data in outputs.values())
    sizes = {"png": len(outputs[next(iter(outputs))]["image/png"]), "script": len(code().packed)}
    assert len(saved) < NOTEBOOK, (sizes, [len(json.dumps(data)) for data in outputs.values()])
    for one in shown:
        one.close()
    run.close()


def widgets_of(models: list[Widget]) -> list[Widget]:
    """Models and what their state refers to, as a page saves it."""
    found = list(models)
    for model in models:
        found += [value for name in model.keys if isinstance(value := getattr(model, name), Widget)]
    return found


def test_all_ranks_are_told_in_turns(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path, Plan.preset("quickstart").with_("parallel.dp=3", "parallel.vision_dp=4"))
    run.start()
    source = RunSource(InboxRun(run.dir), run.dir)
    phases = Phases(source)
    told = []
    for _ in range(4):
        run.train(20)
        source._looked = float("-inf")
        source.look()
        before, frame = (told[-1] if told else {}), phases.frame()
        told.append(frame)
        assert [frame[f"row {rank}"] for rank in range(16)] != [before.get(f"row {rank}") for rank in range(16)]
    changed = [sum(a[f"row {rank}"] != b[f"row {rank}"] for rank in range(16)) for a, b in pairwise(told)]
    assert changed == [6, 6, 6]
    assert all(told[0][f"row {rank}"] != told[-1][f"row {rank}"] for rank in range(16))
    run.close()
