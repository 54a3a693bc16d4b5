"""What a cell shows of each public object: text and HTML (or a picture), wherever no widget can live."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from IPython.core.formatters import DisplayFormatter

from mmlab.cluster.registry import LabPaths, this_process
from mmlab.lab import Lab, Run
from mmlab.messages import write_json
from mmlab.plan import Plan
from mmlab.tracking.sent import Sent
from mmlab.ui.dashboard import PARTS, Dashboard, part
from mmlab.ui.form import Form
from mmlab.ui.snapshot import snapshot
from mmlab.ui.source import RunSource
from ui.synthetic import SyntheticRun

PLAN = Plan.preset("laptop")
PLANS: dict[str, Callable[[], Any]] = {
    "plan": lambda: PLAN,
    "problems": lambda: PLAN.with_("parallel.tp=3").check(),
    "no problems": PLAN.check,
    "layout": PLAN.layout,
    "schedule": PLAN.schedule,
    "memory": PLAN.memory,
    "diff": lambda: PLAN.diff(PLAN.with_("parallel.tp=2")),
}
RUNS: dict[str, Callable[[Run], Any]] = {
    "snapshot": snapshot,
    "traffic": Run.traffic,
    "compression": Run.compression,
    "diagnose": Run.diagnose,
    "command": Run.pause,
}


def shown(thing: Any) -> dict[str, Any]:
    """What a front end without widgets gets."""
    data, _ = DisplayFormatter().format(thing)
    return dict(data)


def check(data: dict[str, Any]) -> None:
    text = data["text/plain"]
    assert text.strip()
    assert " object at 0x" not in text
    picture = data.get("image/png")
    assert picture or "<" in data["text/html"]
    if "text/html" in data:
        assert len(data["text/html"]) > len("<p></p>")


@pytest.fixture
def run(started: SyntheticRun) -> Run:
    started.train(12)
    started.evaluate()
    started.trace()
    return Run(started.dir)


@pytest.mark.parametrize("name", PLANS)
def test_plans_and_what_they_give(name: str) -> None:
    check(shown(PLANS[name]()))


@pytest.mark.parametrize("name", RUNS)
def test_runs_and_what_they_give(name: str, run: Run) -> None:
    check(shown(RUNS[name](run)))


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_the_dashboard(name: str, run: Run) -> None:
    one = part(RunSource(run, run.dir), name)
    one.source.look()
    check(one.still()[0])
    assert repr(one).strip()


def test_the_dashboard_is_a_picture_and_text(run: Run) -> None:
    board = Dashboard(run, run.dir)
    board.source.look()
    check(board.still()[0])


def test_a_cell_tells_colab_which_manager_it_needs(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    manager = SimpleNamespace(_installed_url="https://manager")
    colab = SimpleNamespace(_widgets=manager, enable_custom_widget_manager=lambda: None)
    monkeypatch.setitem(sys.modules, "google.colab.output", colab)
    board = Dashboard(run, run.dir)
    _, metadata = board.bundle()
    told = metadata["application/vnd.jupyter.widget-view+json"]
    assert told == {"colab": {"custom_widget_manager": {"url": "https://manager"}}}
    board.close()


def test_the_form_of_a_plan() -> None:
    form: Form = PLAN.form()
    check(form.still()[0])


def test_a_lab_says_how_it_stands(tmp_path: Path) -> None:
    paths = LabPaths(tmp_path / "ab12")
    paths.root.mkdir()
    write_json(paths.config, {"engines": 3})
    write_json(
        paths.state,
        {"keeper": this_process(), "state": "failed", "reason": "no engine came", "engines": [], "runs": []},
    )
    data = shown(Lab._of(paths))
    check(data)
    assert "ab12" in data["text/html"]
    assert "none yet: lab.train(plan)" in data["text/html"]


def test_a_command_without_an_answer(tmp_path: Path) -> None:
    data = shown(Sent("pause", "1", tmp_path))
    check(data)
    assert "sent, applied at the next step boundary" in data["text/html"]
