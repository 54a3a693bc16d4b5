"""The form of a plan without a page: every field, requests and refusals, what stays when it is saved, training."""

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import BaseModel

from mmlab.errors import LabError, PlanError
from mmlab.plan import Plan
from mmlab.plan.keys import get
from mmlab.ui.form import Form
from mmlab.ui.panels.form import MOST_DRAWN, MOST_PLACED, FormPanel, pictures
from mmlab.ui.view import View


def leaves(model: type[BaseModel], prefix: str = "") -> dict[str, str]:
    """Docstrings of the schema's leaf fields by dotted name, straight from pydantic."""
    found: dict[str, str] = {}
    for name, info in model.model_fields.items():
        kind = info.annotation
        nested = isinstance(kind, type) and issubclass(kind, BaseModel)
        found |= leaves(kind, f"{prefix}{name}.") if nested else {prefix + name: info.description or ""}
    return found


@pytest.fixture
def form() -> Form:
    return Plan.preset("laptop").form()


def panel_of(form: Form) -> FormPanel:
    (panel,) = form.panels.values()
    assert isinstance(panel, FormPanel)
    return panel


def test_every_field_of_the_schema_is_there_with_its_docstring_and_value(form: Form) -> None:
    frame = panel_of(form).frame()
    schema = leaves(Plan)
    assert {one["key"]: one["help"] for one in frame["fields"]} == {
        key: " ".join(doc.split()) for key, doc in schema.items()
    }
    assert all(one["help"] for one in frame["fields"])
    assert {name[1:] for name in frame if name.startswith("=")} == set(schema)
    kinds = {one["key"]: one["entry"] for one in frame["fields"]}
    assert kinds["parallel.schedule"] == "choice"
    assert kinds["train.vision.frozen"] == "switch"
    assert kinds["parallel.layers_per_stage"] == "list"
    assert kinds["train.language.lr"] == "number"
    json.dumps(frame)


def test_few_fields_come_first_and_each_section_is_together(form: Form) -> None:
    fields = panel_of(form).frame()["fields"]
    first = [one["key"] for one in fields if one["first"]]
    assert 20 <= len(first) <= 35
    tops = [one["key"].split(".")[0] for one in fields]
    order = list(dict.fromkeys(tops))
    assert order[:5] == ["name", "parallel", "model", "data", "train"]
    assert tops == sorted(tops, key=order.index)


def test_a_change_sends_that_field_and_what_follows_from_it_alone(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(View, "send", lambda _, content, buffers=None: sent.append(content))
    view = View(["form"], "test")
    view.send_history(form.frames(), {})
    form.set("train.clip_norm", 2)
    view.send_tick(form.frames(), {})
    (changed,) = sent[-1]["frames"].values()
    assert {"=train.clip_norm", "revision", "changed", "undo", "said"} == set(changed)
    assert len(json.dumps(sent[-1])) < 2_000


def test_requests_do_what_the_verbs_do(form: Form, tmp_path: Path) -> None:
    panel = panel_of(form)
    assert panel.handle("enter", {"key": "parallel.tp", "text": "3"}) == {"ok": True}
    assert form.plan == Plan.preset("laptop").with_("parallel.tp=3")
    problem = panel.frame()["problems"][0]
    assert problem["changes"] == [["parallel.tp", "3", "2"]]
    told = panel.handle("repaired", {})["changes"]
    panel.handle("fix", {"overrides": problem["overrides"]})
    assert form.plan.parallel.tp == 2
    panel.handle("undo", {})
    panel.handle("repair", {})
    assert not form.check()
    assert [[key, "3", str(get(form.plan, key))] for key, _, _ in told] == told
    assert panel.handle("enter", {"key": "train.steps", "text": "5x"}) == {"ok": False}
    assert panel.frame()["mistyped"]["train.steps"]["text"] == "5x"
    panel.handle("reset", {"key": "train.steps"})
    assert panel.frame()["mistyped"] == {}
    path = str(tmp_path / "plan.toml")
    assert panel.handle("save", {"path": path}) == {"saved": path}
    assert panel.handle("save", {"path": path}) == {"there": path}
    assert panel.handle("save", {"path": path, "overwrite": True}) == {"saved": path}
    panel.handle("start", {"preset": "vlm-70b"})
    assert panel.frame()["ranks"] == 84
    panel.handle("load", {"path": path})
    assert panel.frame()["base"] == {"kind": "file", "name": path}
    assert Plan.loads(panel.handle("toml", {"comments": True})["text"]) == form.plan
    for verb, args in (
        ("enter", {"key": "parallel.tpp", "text": "1"}),
        ("load", {"path": "nowhere"}),
        ("save", {"path": ""}),
    ):
        with pytest.raises(PlanError):
            panel.handle(verb, args)
    with pytest.raises(ValueError, match="unknown request"):
        panel.handle("explode", {})


def test_a_fix_of_several_fields_tells_all_of_them(form: Form) -> None:
    form.start("quickstart")
    form.set("parallel.engine", "deepspeed")
    several = [one for one in panel_of(form).frame()["problems"] if len(one["changes"]) > 1]
    assert several
    form.fix(several[0]["overrides"])
    for key, _, after in several[0]["changes"]:
        assert str(get(form.plan, key)) == after


def test_pictures_are_bounded() -> None:
    small = pictures(Plan.preset("laptop"))
    assert small["layout"].startswith("<svg")
    assert "bubble" in small["schedule"]
    wide = Plan.preset("laptop").with_(
        {"parallel.dp": MOST_PLACED, "parallel.microbatches": 1, "data.global_batch": MOST_PLACED}
    )
    assert set(pictures(wide)) == {"layout_not", "schedule"}
    long = Plan.preset("laptop").with_({"parallel.microbatches": MOST_DRAWN})
    assert "schedule_not" in pictures(long)
    broken = Plan.preset("laptop").with_("model.language.layers=1", "parallel.pp=4", "parallel.layers_per_stage=[9]")
    assert set(pictures(broken)) <= {"layout", "layout_not", "schedule", "schedule_not"}


def test_absurd_numbers_leave_the_form_alive(form: Form) -> None:
    for change in ({"parallel.dp": 10**9}, {"parallel.microbatches": 10**9}, {"model.language.layers": 10**9}):
        form.start("laptop")
        form.set(*next(iter(change.items())))
        assert panel_of(form).frame()["ranks"] == form.plan.world_size
        assert pictures(form.plan)


def test_without_a_page_it_is_text_and_tables(form: Form) -> None:
    form.set("parallel.tp", 3)
    panel_of(form).handle("enter", {"key": "train.steps", "text": "<b>"})
    for said in (repr(form), form.still()[0]["text/html"]):
        assert "parallel.tp" in said
        assert "do not split over tp 3" in said
        assert "whole number" in said
    assert "&lt;b&gt;" in said
    assert "<b>&#x27;" not in said


def test_a_saved_notebook_shows_the_plan_as_it_stands(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmlab.ui.form.QUIET", 0.05)
    monkeypatch.setattr(View, "send", lambda *_, **__: None)
    form._period = 0.02
    view = form.view
    form.set("train.steps", 777)
    end = time.monotonic() + 10
    while "777" not in view.still:
        assert time.monotonic() < end
        time.sleep(0.01)
    form.close()
    assert form.over
    assert form._thread is not None
    assert not form._thread.is_alive()


def test_train_needs_a_lab_and_a_plan_without_faults(form: Form) -> None:
    with pytest.raises(LabError, match="no lab"):
        form.train()
    assert not panel_of(form).frame()["lab"]
    trained: list[Plan] = []

    def train(plan: Plan) -> Any:
        plan.check().raise_if_any()
        trained.append(plan)
        return SimpleNamespace(id="run-7", plan=plan)

    able = Plan.preset("laptop").form(SimpleNamespace(train=train))
    panel = panel_of(able)
    panel.handle("enter", {"key": "train.steps", "text": "x"})
    with pytest.raises(PlanError, match=r"train\.steps"):
        panel.handle("train", {})
    panel.handle("enter", {"key": "train.steps", "text": "3"})
    assert panel.handle("train", {}) == {"run": "run-7"}
    assert trained == [Plan.preset("laptop").with_("train.steps=3")]
    assert panel.frame()["run"] == {"id": "run-7", "name": "laptop"}
    assert able.run.id == "run-7"
