"""Axe over the dashboard with all its tabs and over every part: no serious or critical accessibility fault."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from mmlab.lab import Run
from mmlab.plan import Plan
from mmlab.ui.dashboard import PARTS, Dashboard, part
from mmlab.ui.form import Form
from mmlab.ui.part import Part
from mmlab.ui.source import RunSource
from ui.axe import serious
from ui.stage import Stage, browser_page
from ui.synthetic import SyntheticRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
LOOKS = [(1200, False), (600, True)]
"""Width and whether dark."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browser_page() as page:
        assert page.context.browser is not None
        yield page.context.browser


@pytest.fixture
def run(started: SyntheticRun) -> SyntheticRun:
    started.train(30)
    started.evaluate()
    started.trace()
    return started


def faults(browser: Browser, shown: Part, width: int, dark: bool) -> list[str]:
    """Those of a part, on each of its tabs."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    try:
        stage = Stage(page, shown, dark)
        stage.until(lambda: page.locator(".mm-board").count() == 1 and stage.sent)
        stage.until(lambda: page.locator(".mm-notice").first.inner_text() == "")
        tabs = page.get_by_role("tab")
        found = serious(page)
        for index in range(1, tabs.count()):
            tabs.nth(index).click()
            page.wait_for_timeout(300)  # for the answer to what is in sight now
            stage.pump()
            found += [f"tab {tabs.nth(index).inner_text()}: {fault}" for fault in serious(page)]
        assert stage.errors == []
        return found
    finally:
        shown.close()
        page.close()


@pytest.mark.parametrize(("width", "dark"), [*LOOKS, (1200, True), (600, False)])
def test_the_dashboard_has_no_serious_fault(browser: Browser, run: SyntheticRun, width: int, dark: bool) -> None:
    assert faults(browser, Dashboard(Run(run.dir), run.dir), width, dark) == []


@pytest.mark.parametrize(("name", "look"), list(zip(sorted(PARTS), itertools.cycle(LOOKS), strict=False)))
def test_parts_have_no_serious_fault(browser: Browser, run: SyntheticRun, name: str, look: tuple[int, bool]) -> None:
    width, dark = look  # one each: the dashboard shows the same panels in all
    assert faults(browser, part(RunSource(Run(run.dir), run.dir), name), width, dark) == []


@pytest.mark.parametrize(("width", "dark"), [*LOOKS, (1600, True), (600, False)])
def test_the_form_of_a_plan_has_no_serious_fault(browser: Browser, width: int, dark: bool) -> None:
    """With problems, with a text that is no value, and while it asks whether to fix all; rows keep their height."""
    page = browser.new_page(viewport={"width": width, "height": 900})
    form = Form(Plan.preset("quickstart"))
    heights = "[...document.querySelectorAll('.mm-form-row')].map((row) => row.getBoundingClientRect().height)"
    try:
        stage = Stage(page, form, dark)
        stage.until(lambda: page.locator(".mm-form-picture svg").count() == 2)
        assert serious(page) == []
        before = page.evaluate(heights)
        for key, text in (("parallel.tp", "3"), ("data.global_batch", "7"), ("train.steps", "many")):
            page.get_by_label(key, exact=True).fill(text)
        stage.until(lambda: "5 problems" in page.locator(".mm-form-found").inner_text())
        assert page.evaluate(heights) == before
        page.get_by_role("button", name="Fix all").click()
        stage.until(lambda: page.locator(".mm-form-preview button").count())
        assert serious(page) == []
        assert stage.errors == []
    finally:
        form.close()
        page.close()


def test_a_failed_run_in_chinese_has_no_serious_fault(
    browser: Browser, run: SyntheticRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MMLAB_LANGUAGE", "zh_CN")
    run.state("failed", "rank 3 (stage 0 tp 1) failed in forward of step 31: boom")
    page = browser.new_page(viewport={"width": 1200, "height": 900})
    board = Dashboard(Run(run.dir), run.dir)
    try:
        stage = Stage(page, board)
        stage.until(lambda: "失败" in page.locator(".mm-state").inner_text())
        assert page.locator(".mm-board").get_attribute("lang") == "zh-CN"
        assert serious(page) == []
        stage.shot(tmp_path / "failed-zh.png")
    finally:
        board.close()
        page.close()
