"""Charts and the frame around panels in a real browser, without Jupyter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from mmlab.lab import Run
from mmlab.ui.dashboard import Dashboard, part
from mmlab.ui.panel import RunPanel
from mmlab.ui.panels.charts import Charts
from mmlab.ui.panels.head import Head
from mmlab.ui.part import Part
from mmlab.ui.source import RunSource
from mmlab.ui.view import View
from ui.stage import DARK, Stage, browser_page
from ui.synthetic import InboxRun, SyntheticRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PIXELS = "(index) => document.querySelectorAll('.mm-plot canvas')[index].toDataURL()"


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with browser_page(1200, 1000) as page:
        yield page


@pytest.fixture
def page(browser: Page) -> Iterator[Page]:
    context = browser.context.browser.new_context(viewport={"width": 1200, "height": 1000})  # type: ignore[union-attr]
    yield context.new_page()
    context.close()


@pytest.fixture
def parts() -> Iterator[list[Part]]:
    made: list[Part] = []
    yield made
    for each in made:
        each.close()


@pytest.fixture
def charts(page: Page, started: SyntheticRun, parts: list[Part]) -> Stage:
    """The charts of 70 steps with marks at 30 and 60."""
    started.train(30)
    started.events.emit("checkpoint", name="step-000030", step=30, path="x", seconds=0.4, bytes=4e6)
    started.train(30)
    started.events.emit("recovery", done=False, reason="rank 3 lost in forward", attempt=1, of=3, step=60)
    started.train(10)
    made = part(RunSource(InboxRun(started.dir), started.dir), "charts")
    parts.append(made)
    stage = Stage(page, made)
    stage.until(lambda: legend(page, 0).startswith("step 70"))
    return stage


def legend(page: Page, index: int) -> str:
    return page.locator(".mm-legend").nth(index).inner_text().replace("\n", " ")


def press(page: Page, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()


def at_step(page: Page, step: float, low: float = 1, high: float = 70) -> tuple[float, float]:
    """Where a step lies on the first chart."""
    box = page.locator(".mm-plot .u-over").first.bounding_box()
    assert box is not None
    return box["x"] + box["width"] * (step - low) / (high - low), box["y"] + box["height"] / 2


def test_charts_are_chosen_smoothed_and_scaled(charts: Stage, page: Page, tmp_path: Path) -> None:
    assert page.locator(".mm-chart h4").all_inner_texts() == ["Loss", "Throughput"]
    for name in ("Gradient norms", "Learning rates", "Data wait", "Phases"):
        press(page, name)
    charts.until(lambda: page.locator(".mm-chart").count() == 6 and "backward" in legend(page, 5))
    assert "vision" in legend(page, 2)
    assert re.search(r"language \d", legend(page, 3))
    for act in (lambda: press(page, "Log scale"), lambda: page.get_by_label("Smoothing").fill("20")):
        before = page.evaluate(PIXELS, 0)
        act()
        charts.until(lambda before=before: page.evaluate(PIXELS, 0) != before)
    charts.until(lambda: charts.part.panels["charts"].smoothing == 20)  # type: ignore[attr-defined]
    assert charts.part.panels["charts"].log  # type: ignore[attr-defined]
    press(page, "Loss")
    charts.until(lambda: page.locator(".mm-chart").count() == 5)
    charts.shot(tmp_path / "charts.png")
    assert charts.errors == []


def test_a_zoom_shows_more_and_a_double_click_all(charts: Stage, page: Page) -> None:
    page.mouse.move(*at_step(page, 20))
    page.mouse.down()
    page.mouse.move(*at_step(page, 40), steps=4)
    page.mouse.up()
    charts.until(
        lambda: any(
            "curves" in content.get("value", {})
            for content, _ in charts.sent
            if content["kind"] == "reply" and content["value"]
        )
    )
    answer = next(content["value"] for content, _ in charts.sent if isinstance(content.get("value"), dict))
    assert 18 <= answer["low"] <= 22
    assert 38 <= answer["high"] <= 42
    page.mouse.move(*at_step(page, 70))
    charts.until(lambda: legend(page, 0).startswith(f"step {int(answer['high'])}"))
    assert legend(page, 1).startswith(f"step {int(answer['high'])}")
    page.mouse.dblclick(*at_step(page, 35))
    page.mouse.move(*at_step(page, 70))
    charts.until(lambda: legend(page, 0).startswith("step 70"))
    assert page.get_by_role("button", name="Whole run").is_disabled()
    assert charts.errors == []


def test_marks_tell_what_happened_and_keys_read_values(charts: Stage, page: Page) -> None:
    page.mouse.move(*at_step(page, 60))
    charts.until(lambda: "rank 3 lost in forward" in page.locator(".mm-tip").first.inner_text())
    assert page.locator(".mm-tip").nth(1).is_hidden()
    plot = page.locator(".mm-plot").first
    plot.focus()
    said = page.locator(".mm-charts > .mm-unseen")
    page.mouse.move(5, 5)
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("Shift+ArrowLeft")
    charts.until(lambda: said.inner_text().startswith("step 50, loss 2."))
    page.keyboard.press("Shift+M")
    charts.until(lambda: "checkpoint saved: " in said.inner_text())
    assert said.inner_text().startswith("step 30, ")
    page.keyboard.press("+")
    charts.until(lambda: said.inner_text().startswith("steps 1"))
    page.keyboard.press("0")
    charts.until(lambda: said.inner_text() == "all steps")
    charts.until(lambda: "loss 1.8" in (plot.get_attribute("aria-label") or ""))
    press(page, "Table")
    charts.until(lambda: "Loss: loss" in page.locator(".mm-figures-table").inner_text())
    assert "step-000030" in page.locator(".mm-figures-table").inner_text()


def test_another_run_is_drawn_beside(charts: Stage, page: Page, tmp_path: Path, started: SyntheticRun) -> None:
    other = SyntheticRun(tmp_path, name="other")
    other.start()
    other.train(90)
    other.finish()
    page.get_by_label("Draw another run").focus()
    charts.until(lambda: page.locator(".mm-charts select option").count() == 2)
    page.get_by_label("Draw another run").select_option(other.dir.name)
    charts.until(lambda: "other" in legend(page, 0) and legend(page, 0).startswith("step 90"))
    page.get_by_role("button", name=re.compile("Draw .*other no longer")).click()
    charts.until(lambda: legend(page, 0).startswith("step 70") and "other" not in legend(page, 0))
    assert charts.errors == []


def test_who_reads_earlier_events_or_the_table_is_left_in_peace(
    page: Page, started: SyntheticRun, parts: list[Part]
) -> None:
    for step in range(1, 41):
        started.train(1)
        started.events.emit("warning", message=f"warning {step}", step=step)
    parts.append(Dashboard(InboxRun(started.dir), started.dir))
    stage = Stage(page, parts[0])
    stage.until(lambda: "warning 40" in page.locator(".mm-events").inner_text())
    assert page.locator(".mm-list").evaluate("(l) => l.scrollHeight - l.scrollTop - l.clientHeight < 5")
    page.locator(".mm-list").evaluate("(list) => { list.scrollTop = 10; list.querySelector('li').id = 'read'; }")
    stage.until(lambda: legend(page, 0).startswith("step 40"))
    started.train(5)
    stage.until(lambda: legend(page, 0).startswith("step 45"))
    sent = len(stage.sent)
    parts[0]._heard(
        None, {"kind": "hello"}, []
    )  # as from another page that is opened, or this one whose answer is late
    stage.until(lambda: "history" in [content["kind"] for content, _ in stage.sent[sent:]])
    stage.pump()
    assert page.locator("#read").count() == 1  # neither points nor the same events again are a reason to make it anew
    started.events.emit("warning", message="one more", step=45)
    stage.until(lambda: "one more" in page.locator(".mm-events").inner_text())
    assert page.locator(".mm-list").evaluate("(list) => list.scrollTop") == 10
    page.get_by_role("button", name="Table").click()
    page.wait_for_timeout(1_200)
    page.locator(".mm-figures-table table").first.evaluate("(table) => { table.id = 'table'; }")
    page.wait_for_timeout(1_200)
    assert page.locator("#table").count() == 1
    started.train(1)
    stage.until(lambda: page.locator("#table").count() == 0)
    assert stage.errors == []


class Faulty(RunPanel):
    """Fails until told otherwise; its page side is that of the list of events."""

    name = "events"
    title = "Last events"
    broken = True

    def frame(self) -> dict[str, Any]:
        if self.broken:
            raise RuntimeError("no such thing")
        return {"events": [{"time": "now", "text": "well again"}]}

    def text(self) -> str:
        return ""


def test_a_panel_that_fails_leaves_the_others_alone(page: Page, started: SyntheticRun, parts: list[Part]) -> None:
    started.train(3)
    source = RunSource(InboxRun(started.dir), started.dir)
    faulty = Faulty(source)
    parts.append(Part(source, [Head(source), faulty], "two panels"))
    stage = Stage(page, parts[0])
    stage.until(lambda: "RuntimeError: no such thing" in page.locator(".mm-events").inner_text())
    started.train(1)
    stage.until(lambda: "step 4 of" in page.locator(".mm-line").inner_text())
    faulty.broken = False
    stage.until(lambda: "well again" in page.locator(".mm-events").inner_text())
    assert page.locator(".mm-trouble").count() == 0


def test_a_renewed_view_keeps_the_keyboard_and_shows_all_at_once(
    page: Page, started: SyntheticRun, parts: list[Part]
) -> None:
    started.train(5)
    parts.append(Dashboard(InboxRun(started.dir), started.dir))
    stage = Stage(page, parts[0])
    stage.until(lambda: "step 5 of" in page.locator(".mm-line").inner_text())
    page.get_by_role("button", name="Checkpoint").first.focus()
    page.evaluate("window.remount()")  # as when the cell's output is replaced
    stage.until(lambda: page.evaluate("document.activeElement.textContent") == "Checkpoint")
    assert "step 5 of" in page.locator(".mm-line").inner_text()
    page.get_by_role("button", name="Log scale").click()
    page.evaluate("window.dispose.slice(1, -1).forEach((each) => each())")  # views of before are gone
    started.train(1)
    stage.until(lambda: "step 6 of" in page.locator(".mm-line").inner_text())
    assert stage.errors == []


def test_two_views_of_one_model_choose_for_themselves_and_go_on_alone(
    page: Page, started: SyntheticRun, parts: list[Part]
) -> None:
    started.train(5)
    source = RunSource(InboxRun(started.dir), started.dir)
    parts.append(Part(source, [Head(source), Charts(source)], "two panels"))
    stage = Stage(page, parts[0])
    page.evaluate("window.render()")
    stage.until(lambda: page.locator(".mm-line").count() == 2)
    stage.until(lambda: all("step 5 of" in text for text in page.locator(".mm-line").all_inner_texts()))
    page.locator(".mm-plot").first.scroll_into_view_if_needed()
    page.get_by_role("button", name="Data wait").last.click()
    stage.until(lambda: page.locator(".mm-chart").count() == 6)  # a choice holds for all views of a part
    page.evaluate("window.dispose[1]()")
    page.evaluate("document.querySelector('.mm-board').remove()")
    started.train(1)
    stage.until(lambda: "step 6 of" in page.locator(".mm-line").inner_text())
    page.evaluate("window.dispose[2]()")
    stage.until(lambda: not parts[0]._shown)  # nobody looks: no panel makes frames
    assert stage.errors == []


def test_a_theme_that_changes_is_followed(charts: Stage, page: Page) -> None:
    before = page.evaluate(PIXELS, 0)
    page.add_style_tag(content=DARK)
    page.evaluate("document.body.dataset.jpThemeLight = 'false'")
    charts.until(lambda: "mm-dark" in (page.locator(".mm-board").get_attribute("class") or ""))
    charts.until(lambda: page.evaluate(PIXELS, 0) != before)


def test_without_a_kernel_a_page_shows_what_was_saved(
    page: Page, started: SyntheticRun, parts: list[Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(View, "answer", lambda view: None)
    started.train(5)
    parts.append(part(RunSource(InboxRun(started.dir), started.dir), "charts"))
    parts[0]._period = 60.0
    parts[0].keep_still()
    stage = Stage(page, parts[0])
    stage.until(lambda: "No kernel answers" in page.locator(".mm-notice").inner_text())
    assert page.locator(".mm-still svg").count() >= 2
    assert stage.sent == []


def test_tabs_wrap_take_arrow_keys_and_draw_what_was_hidden_in_the_theme_of_now(
    page: Page, started: SyntheticRun, parts: list[Part], tmp_path: Path
) -> None:
    started.train(5)
    parts.append(Dashboard(Run(started.dir), started.dir))
    stage = Stage(page, parts[0])
    stage.until(lambda: "step 5 of" in page.locator(".mm-line").inner_text())
    before = page.evaluate(PIXELS, 0)
    tabs = page.get_by_role("tab")
    tabs.first.focus()
    page.keyboard.press("ArrowLeft")
    assert tabs.last.get_attribute("aria-selected") == "true"
    assert page.evaluate("document.activeElement.textContent") == tabs.last.inner_text()
    stage.until(lambda: "charts" not in parts[0]._shown and {"head", "controls"} < parts[0]._shown)
    page.add_style_tag(content=DARK)
    page.evaluate("document.body.dataset.jpThemeLight = 'false'")
    stage.until(lambda: "mm-dark" in (page.locator(".mm-board").get_attribute("class") or ""))
    page.set_viewport_size({"width": 620, "height": 1000})
    page.keyboard.press("ArrowRight")
    stage.until(lambda: page.evaluate(PIXELS, 0) != before and "charts" in parts[0]._shown)
    width = page.locator(".mm-plot").first.bounding_box()["width"]  # type: ignore[index]
    stage.until(lambda: page.locator(".mm-plot canvas").first.bounding_box()["width"] == int(width))  # type: ignore[index]
    assert page.evaluate("document.documentElement.scrollWidth") <= 620
    top = tabs.first.bounding_box()["y"]  # type: ignore[index]
    for index in range(tabs.count()):
        tabs.nth(index).click()
        stage.until(lambda index=index: tabs.nth(index).get_attribute("aria-selected") == "true")
        assert page.evaluate("document.documentElement.scrollWidth") <= 620, tabs.nth(index).inner_text()
        assert tabs.first.bounding_box()["y"] == top  # type: ignore[index]
    stage.shot(tmp_path / "narrow-dark.png")
    assert stage.errors == []
