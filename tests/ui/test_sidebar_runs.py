"""The sidebar in a real JupyterLab over runs without engines: ends told once, no answer, no server, looking only."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from mmlab.messages import Inbox
from mmlab.plan import Plan
from ui.jupyterlab import TOKEN, jupyterlab, keep_shot, serious, wait_for
from ui.stage import browser_page
from ui.synthetic import SyntheticRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
SIDEBAR = "#mmlab-sidebar"


def open_lab(page: Page, address: str) -> None:
    page.goto(f"{address}/lab?token={TOKEN}&reset")
    page.get_by_role("tab", name=re.compile("labs, runs and ranks")).click()
    expect(page.locator(SIDEBAR)).to_be_visible(timeout=60_000)


def started(folder: Path, name: str, steps: int = 120) -> SyntheticRun:
    run = SyntheticRun(folder / "runs", Plan.preset("quickstart").with_(f"train.steps={steps}"), name)
    run.start()
    run.train(40)
    return run


def told(*pages: Page) -> list[str]:
    """The notifications that pages show."""
    return [text for page in pages for text in page.locator(".Toastify__toast").all_inner_texts()]


@pytest.fixture
def stack() -> Iterator[contextlib.ExitStack]:
    with contextlib.ExitStack() as stack:
        yield stack


def test_ends_are_told_once_and_silence_is_noticed(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    runs = [
        started(tmp_path, "a-run-with-a-name-that-is-much-longer-than-the-sidebar-is-wide"),
        started(tmp_path, "跑"),
    ]
    with jupyterlab(tmp_path) as address:
        browser = stack.enter_context(browser_page()).context.browser
        assert browser is not None
        page = browser.new_context(viewport={"width": 1300, "height": 950}).new_page()
        open_lab(page, address)
        side = page.locator(SIDEBAR)
        expect(side.locator(".mmlab-run")).to_have_count(2, timeout=20_000)
        expect(side.locator(".mmlab-ranks tbody tr")).to_have_count(6, timeout=20_000)
        assert serious(page, SIDEBAR) == []
        assert side.evaluate("(node) => node.scrollWidth - node.clientWidth") <= 0
        keep_shot(page, tmp_path / "sidebar-light.png")
        no_answer(page, runs)
        launcher_and_palette(page)

        other = page.context.new_page()
        open_lab(other, address)
        expect(other.locator(f"{SIDEBAR} .mmlab-run")).to_have_count(2, timeout=20_000)
        runs[0].finish("failed", "rank 2 (stage 0 tp 1) failed in backward of step 41: out of memory")
        runs[1].finish()
        wait_for(lambda: len(told(page, other)) == 2, 40)
        other.wait_for_timeout(12_000)  # as long as the slower of both tabs takes to look again
        words = told(page, other)
        assert len([text for text in words if "failed: rank 2 (stage 0 tp 1)" in text]) == 1
        assert len([text for text in words if "failed" not in text]) <= 1  # the other one leaves by itself
        other.close()
        page.reload()
        expect(side.locator(".mmlab-run")).to_have_count(2, timeout=60_000)
        page.wait_for_timeout(2_000)
        assert [text for text in told(page) if "failed" in text] == []
        attempts: list[str] = []
        page.on("request", lambda request: attempts.append(request.url) if "/mmlab/" in request.url else None)
    wait_for(lambda: "No answer from the server" in side.inner_text(), 30)
    attempts.clear()
    page.wait_for_timeout(8_000)
    assert len(attempts) <= 2


def no_answer(page: Page, runs: list[SyntheticRun]) -> None:
    """Nobody reads the inbox: the page says so and what else can be done; the abort is in the inbox."""
    side = page.locator(SIDEBAR)
    chosen = next(run for run in runs if run.paths.root.name in side.locator(".mmlab-id").inner_text())
    side.get_by_role("button", name="Emergency stop…").click()
    assert page.evaluate("document.activeElement.innerText") == "Cancel"
    page.locator(".jp-Dialog").get_by_role("button", name="Abort now").click()
    dialog = page.locator(".jp-Dialog")
    expect(dialog).to_contain_text("have not answered within 6 s", timeout=20_000)
    expect(dialog).to_contain_text("Its lab does not live here")
    keep_shot(page, page_folder(runs) / "no-answer.png")
    dialog.get_by_role("button", name="Keep waiting").click()
    assert [command.verb for command in Inbox(chosen.paths.control).pending()] == ["abort"]
    chosen.answer()


def page_folder(runs: list[SyntheticRun]) -> Path:
    return runs[0].dir.parent.parent


def launcher_and_palette(page: Page) -> None:
    """The card opens the quickstart notebook, the palette has the commands."""
    page.keyboard.press("Control+Shift+c")
    page.keyboard.type("mmlab")
    for label in ("Start a Lab…", "New Notebook with a Run", "Stop the Active Run", "Open the Quickstart Notebook"):
        expect(page.locator(".lm-CommandPalette-itemLabel", has_text=label)).to_be_visible(timeout=10_000)
    page.keyboard.press("Escape")
    page.locator(".jp-LauncherCard", has_text="Quickstart").click()
    expect(page.locator(".lm-DockPanel-tabBar .lm-TabBar-tab", has_text="01_quickstart.ipynb")).to_be_visible(
        timeout=30_000
    )


def test_a_server_that_only_looks_says_so(tmp_path: Path, stack: contextlib.ExitStack) -> None:
    run = started(tmp_path, "looked-at")
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "jupyter_server_config.py").write_text("c.MmlabServer.allow_control = False\n")
    with jupyterlab(tmp_path) as address:
        page = stack.enter_context(browser_page(1100, 800))
        open_lab(page, address)
        side = page.locator(SIDEBAR)
        expect(side.get_by_text("steering is switched off")).to_be_visible(timeout=20_000)
        for name in ("Start a lab…", "Pause", "Stop", "Checkpoint", "Emergency stop…"):
            expect(side.get_by_role("button", name=name, exact=True)).to_be_disabled()
    run.close()
