"""The controls: what each says of its commands, whoever gave them, and the live check of another layout."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from mmlab.errors import PlanError
from mmlab.lab import Run
from mmlab.messages import new_command, send
from mmlab.ui.commands import controls_of
from mmlab.ui.dashboard import part
from mmlab.ui.panels.controls import Controls
from mmlab.ui.source import RunSource
from ui.stage import Stage, browser_page
from ui.synthetic import SyntheticRun


@pytest.fixture
def controls(started: SyntheticRun) -> Controls:
    started.train(5)
    source = RunSource(Run(started.dir), started.dir)
    source.look()
    return Controls(source)


def looked(controls: Controls) -> dict[str, Any]:
    controls.source.feed.read()
    return controls.frame()


def test_each_control_tells_its_newest_command_whoever_gave_it(controls: Controls, started: SyntheticRun) -> None:
    sent = controls.handle("pause", {})
    other = new_command("pause", source="cli")
    send(started.dir / "control", other)
    send(started.dir / "control", new_command("set", {"values": {"train.vision.lr": 1e-4, "train.language.lr": 1e-4}}))
    told = looked(controls)["controls"]
    assert told["pause"] == {"id": other.id, "verb": "pause", "text": "pause", "source": "cli", "waits": 2}
    assert sent["id"] < other.id
    assert set(told) == {"pause", "rate vision", "rate language"}
    started.answer()
    told = looked(controls)["controls"]
    assert {k: told["pause"][k] for k in ("id", "ok", "step", "ranks", "of")} == {
        "id": other.id, "ok": True, "step": 5, "ranks": 6, "of": 6,
    }  # fmt: skip
    started.events.emit("command", id="9", verb="resume", args={}, ok=False, ranks=[0, 1], message="no", step=6)
    told = looked(controls)["controls"]["pause"]
    assert (told["text"], told["ok"], told["ranks"], told["of"], told["message"]) == ("resume", False, 2, 6, "no")


def test_ranks_are_counted_in_the_layout_that_answered(controls: Controls, started: SyntheticRun) -> None:
    started.events.emit("command", id="1", verb="step", args={"n": 2}, ok=True, ranks=[0, 1, 2], message="", step=5)
    started.events.emit(
        "relayout", name="x", changes={}, before=3, after=6, generation=2, through="memory", bytes=1, seconds=0.1,
        steps=120, step=5,
    )  # fmt: skip
    assert looked(controls)["controls"]["step"]["of"] == 3


def test_commands_that_no_button_gives_do_not_disturb(controls: Controls, started: SyntheticRun) -> None:
    started.events.emit("command", verb="chaos", args={"action": "kill"}, ok=True, step=5)
    (started.dir / "control" / "odd.json").write_text('{"verb": "set", "args": {"values": 3}}')
    (started.dir / "control" / "worse.json").write_text('{"verb": "set", "args": [1]}')
    assert set(looked(controls)["controls"]) == {"chaos"}


def test_verbs_map_to_controls() -> None:
    assert controls_of("resume", {}) == ["pause"]
    assert controls_of("set", {"values": {"train.steps": 3, "train.projector.lr": 1}}) == ["rate projector"]
    assert controls_of("abort", {}) == ["abort"]


def test_a_layout_is_checked_without_sending_anything(controls: Controls, started: SyntheticRun) -> None:
    found = controls.handle("check_relayout", {"changes": "parallel.tp=1 parallel.microbatches=4"})
    assert found == {"changes": ["parallel.tp 2 -> 1", "parallel.microbatches 2 -> 4"], "before": 6, "after": 4}
    for bad, reason in ((" ", "no change was given"), ("parallel.tp=1 and more", "'and' is no change")):
        with pytest.raises(PlanError, match=reason):
            controls.handle("check_relayout", {"changes": bad})
    with pytest.raises(Exception, match="the samples or their order would be others"):
        controls.handle("check_relayout", {"changes": "data.global_batch=4"})
    assert not list((started.dir / "control").glob("*.json"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_controls_say_what_became_of_their_commands(started: SyntheticRun, tmp_path: Path) -> None:
    started.train(12)
    with browser_page(1200, 900) as page:
        page.clock.install()
        stage = Stage(page, part(RunSource(Run(started.dir), started.dir), "controls"))

        def told(control: str) -> str:
            return page.locator(f'[data-control="{control}"]').inner_text()

        stage.until(lambda: "step 12" in page.locator(".mm-line").inner_text())
        height = page.locator(".mm-controls").bounding_box()["height"]  # type: ignore[index]
        assert height < 130  # two rows of controls, a line of text for each, one for the newest answer
        now = (
            """(save) => { save.click(); return document.querySelector('[data-control="checkpoint"]').textContent; }"""
        )
        assert page.get_by_role("button", name="Checkpoint").evaluate(now) == "sent"
        stage.until(lambda: "checkpoint: waiting for the end of step 13" in told("checkpoint"))
        send(started.dir / "control", new_command("step", {"n": 2}, source="cli"))
        stage.until(lambda: "step 2: waiting" in told("step"))
        started.answer()
        stage.until(lambda: "applied after step 12 on 6 of 6 ranks" in told("checkpoint"))
        stage.until(lambda: "step 2: applied after step 12 on 6 of 6 ranks" in told("step"))
        stop = page.get_by_role("button", name="Stop")
        stop.click()
        stage.pump()
        assert told("stop") == ""
        assert page.get_by_role("button", name="Really stop").count() == 1
        assert not list((started.dir / "control").glob("*.json"))
        rate = page.get_by_label("Base learning rate of vision")
        rate.fill("-1")
        rate.press("Enter")
        assert "refused: -1 is not a learning rate" in told("rate vision")
        changes = page.get_by_label("Changes to the layout")
        changes.fill("data.global_batch=4")
        stage.until(lambda: "the samples or their order would be others" in page.locator(".mm-checked").inner_text())
        assert changes.get_attribute("aria-invalid") == "true"
        changes.press("Enter")
        stage.until(lambda: "refused: a run that goes on keeps its model" in told("relayout"))
        changes.fill("parallel.microbatches=4")
        stage.until(lambda: "6 -> 6 ranks" in page.locator(".mm-checked").inner_text())
        changes.press("Enter")
        stage.until(lambda: "relayout parallel.microbatches = 4: waiting" in told("relayout"))
        assert page.locator(".mm-controls").bounding_box()["height"] == height  # type: ignore[index]
        page.set_viewport_size({"width": 600, "height": 900})
        stage.until(lambda: page.locator(".mm-controls").bounding_box()["height"] < 230)  # type: ignore[index]
        cut = "[...document.querySelectorAll('.mm-figure b')].filter((node) => node.scrollWidth > node.clientWidth)"
        assert page.evaluate(f"{cut}.map((node) => node.textContent)") == []
        stage.shot(tmp_path / "controls.png")
        page.clock.run_for(40_000)  # no message passes meanwhile
        assert "The kernel has not answered since" in page.locator(".mm-notice").inner_text()
        stage.until(lambda: not page.locator(".mm-notice").inner_text())
        started.close()
        shutil.rmtree(started.dir)
        stage.until(lambda: "deleted" in page.locator(".mm-state").inner_text())
        assert page.locator(".mm-reason").inner_text() == f"{started.dir} is gone"
        assert page.locator(".mm-controls button:enabled, .mm-controls input:enabled").count() == 0
        stage.shot(tmp_path / "deleted.png")
        assert stage.errors == []
