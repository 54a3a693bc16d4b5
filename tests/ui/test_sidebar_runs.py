"""The sidebar in a real JupyterLab over runs without training: ends told once, labs that do not answer or whose keeper
died, no server, looking only, a browser that keeps nothing."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from own_places import own_places
from playwright.sync_api import Page, expect

from mmlab.lab import Lab, Run
from mmlab.messages import Inbox
from mmlab.plan import Plan
from ui.jupyterlab import TOKEN, in_chinese, jupyterlab, keep_shot, serious, wait_for
from ui.stage import browser_page
from ui.synthetic import SyntheticRun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
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
        expect(side.locator(".mmlab-run")).to_have_count(2)
        expect(side.locator(".mmlab-ranks tbody tr")).to_have_count(6)
        assert serious(page, SIDEBAR) == []
        assert side.evaluate("(node) => node.scrollWidth - node.clientWidth") <= 0
        keep_shot(page, tmp_path / "sidebar-light.png")
        no_answer(page, runs)
        launcher_and_palette(page)
        short = started(tmp_path, "begun-and-ended-between-two-looks")
        short.finish("failed", "no room")
        wait_for(lambda: [text for text in told(page) if "no room" in text])
        short.close()

        other = page.context.new_page()
        open_lab(other, address)
        expect(other.locator(f"{SIDEBAR} .mmlab-run")).to_have_count(3)
        runs[0].finish("failed", "rank 2 (stage 0 tp 1) failed in backward of step 41: out of memory")
        runs[1].finish()
        wait_for(lambda: len(told(page, other)) == 3, seen=lambda: told(page, other))
        other.wait_for_timeout(12_000)  # as long as the slower of both tabs takes to look again
        words = told(page, other)
        assert len([text for text in words if "failed: rank 2 (stage 0 tp 1)" in text]) == 1
        assert len([text for text in words if "failed" not in text]) <= 1  # the other one leaves by itself
        other.close()
        page.reload()
        expect(side.locator(".mmlab-run")).to_have_count(3)
        page.wait_for_timeout(2_000)
        assert [text for text in told(page) if "failed" in text] == []
        attempts: list[str] = []
        page.on("request", lambda request: attempts.append(request.url) if "/mmlab/" in request.url else None)
    wait_for(lambda: "No answer from the server" in side.inner_text())
    expect(page.locator("#jp-main-statusbar .mmlab-status")).to_contain_text("no answer")
    attempts.clear()
    page.wait_for_timeout(8_000)
    assert len(attempts) <= 2
    with jupyterlab(tmp_path, port=int(address.rpartition(":")[2]), **in_chinese(tmp_path)):
        runs.append(started(tmp_path, "after-the-restart"))
        page.evaluate("window.dispatchEvent(new Event('focus'))")  # somebody looks: sooner than the next attempt
        expect(side.locator(".mmlab-run")).to_have_count(4)
        expect(side.locator(".mmlab-trouble")).to_have_text("")
        page.reload()
        expect(side.get_by_role("button", name="紧急停止…")).to_be_visible(timeout=60_000)
        expect(page.locator("#jp-main-statusbar .mmlab-status")).to_contain_text("运行中")
        keep_shot(page, tmp_path / "sidebar-zh.png")
    for run in runs:
        run.close()


def no_answer(page: Page, runs: list[SyntheticRun]) -> None:
    """Nobody reads the inbox: the page says so and what else can be done; the abort is in the inbox."""
    side = page.locator(SIDEBAR)
    chosen = next(run for run in runs if run.paths.root.name in side.locator(".mmlab-id").inner_text())
    side.get_by_role("button", name="Emergency stop…").click()
    expect(page.locator(".jp-Dialog").get_by_role("button", name="Cancel")).to_be_focused()
    page.locator(".jp-Dialog").get_by_role("button", name="Abort now").click()
    dialog = page.locator(".jp-Dialog")
    expect(dialog).to_contain_text("have not answered within 6 s")
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
    expect(page.locator(".lm-CommandPalette-input")).to_be_focused()
    page.keyboard.type("mmlab")
    for label in ("Start a Lab…", "New Notebook with a Run", "Stop the Active Run", "Open the Quickstart Notebook"):
        expect(page.locator(".lm-CommandPalette-itemLabel", has_text=label)).to_be_visible()
    page.keyboard.press("Escape")
    page.locator(".jp-LauncherCard", has_text="Quickstart").click()
    expect(page.locator(".lm-DockPanel-tabBar .lm-TabBar-tab", has_text="01_quickstart.ipynb")).to_be_visible()


def test_a_server_that_only_looks_says_so_below_a_hub_and_to_a_browser_that_keeps_nothing(
    tmp_path: Path, stack: contextlib.ExitStack
) -> None:
    root = tmp_path / "my 项目 100 %"
    run, other = started(root, "looked-at"), started(root, "gone-soon")
    run.dir.rename(root / "runs" / "ein Lauf, 跑 #1?")
    (tmp_path / "config").mkdir()
    options = f"c.MmlabServer.allow_control = False\nc.MmlabServer.root_dir = {str(root)!r}\n"
    (tmp_path / "config" / "jupyter_server_config.py").write_text(options)
    with jupyterlab(tmp_path, base="/user/x") as address:
        page = stack.enter_context(browser_page(1100, 800))
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.add_init_script(BLOCKED)
        open_lab(page, address)
        side = page.locator(SIDEBAR)
        expect(side.get_by_text("steering is switched off")).to_be_visible()
        for name in ("Start a lab…", "Pause", "Stop", "Checkpoint", "Emergency stop…"):
            expect(side.get_by_role("button", name=name, exact=True)).to_be_disabled()
        side.get_by_role("button", name=re.compile("gone-soon")).click()
        expect(side.locator(".mmlab-ranks tbody tr")).to_have_count(6)
        other.close()
        shutil.rmtree(other.dir)
        side.get_by_role("button", name=re.compile("ein Lauf, 跑 #1")).click()
        expect(side.locator(".mmlab-view .mmlab-id")).to_have_text("ein Lauf, 跑 #1?")
        expect(side.locator(".mmlab-ranks tbody tr")).to_have_count(6)
        expect(side.locator(".mmlab-run")).to_have_count(1)
        assert "extension" not in side.inner_text()
        run.finish("failed", "in a browser that keeps nothing")
        wait_for(lambda: len(told(page)) == 1, seen=lambda: told(page))
        page.wait_for_timeout(3_000)
        assert len(told(page)) == 1
        root.rename(tmp_path / "elsewhere")
        expect(side.get_by_text("the folder of this server is gone")).to_be_visible()
        page.route("**/mmlab/overview*", lambda route: route.fulfill(status=404, body="<html>404</html>"))
        expect(side.get_by_text("does not have mmlab’s extension")).to_be_visible()
        assert errors == []
    run.close()


BLOCKED = """for (const name of ["getItem", "setItem"]) {
  const known = Storage.prototype[name];
  Storage.prototype[name] = function (key, ...more) {
    if (key.startsWith("mmlab")) throw new DOMException("denied", "SecurityError");
    return known.call(this, key, ...more);
  };
}"""
"""A browser that refuses storage, to mmlab alone: JupyterLab itself does not start without."""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Labs and runs of the test's own, for the server too."""
    own_places(monkeypatch, tmp_path)
    return tmp_path


def test_labs_are_closed_past_a_keeper_that_is_stopped_and_after_one_that_died(place: Path) -> None:
    plan = Plan.preset("laptop").with_("train.steps=100000", "parallel.pp=1", "cluster.max_recoveries=0")
    with contextlib.ExitStack() as stack:
        labs = [Lab(engines=2, worker="fake_worker"), Lab(engines=1, worker="fake_worker")]
        for lab in labs:
            stack.callback(lab.close)
        run = labs[0].train(plan)
        page = stack.enter_context(browser_page(1100, 900))
        address = stack.enter_context(jupyterlab(place))
        open_lab(page, address)
        side = page.locator(SIDEBAR)
        run.wait(step=3, timeout=180)
        labs[1].wait(180)
        pids = [[process["pid"] for process in lab.info()["processes"]] for lab in labs]
        keepers = [lab.info()["keeper"]["pid"] for lab in labs]
        close_past_a_stopped_keeper(page, run, labs[0], keepers[0])
        wait_for(lambda: not [pid for pid in (*pids[0], keepers[0]) if psutil.pid_exists(pid)])

        for pid in pids[1]:
            os.kill(pid, signal.SIGSTOP)  # or they would end by themselves
        os.kill(keepers[1], signal.SIGKILL)
        row = side.locator(".mmlab-lab")
        expect(row).to_contain_text("its keeper died; closing it ends what is left of it")
        row.get_by_role("button", name=re.compile("^Close lab")).click()
        expect(page.locator(".jp-Dialog")).to_contain_text("Its keeper has died")
        page.locator(".jp-Dialog").get_by_role("button", name="Close the lab").click()
        expect(side.get_by_text("what was left of it was ended")).to_be_visible()
        wait_for(lambda: not [pid for pid in pids[1] if psutil.pid_exists(pid)])
        expect(side.get_by_text("No lab lives.")).to_be_visible()


def close_past_a_stopped_keeper(page: Page, run: Run, lab: Lab, keeper: int) -> None:
    """Ranks and keeper do nothing any longer: the emergency stop says so, and ends all of them."""
    side = page.locator(SIDEBAR)
    expect(side.locator(".mmlab-view .mmlab-state")).to_contain_text("running")
    for pid in (keeper, *(rank["pid"] for rank in run.status()["ranks"])):
        os.kill(pid, signal.SIGSTOP)
    side.get_by_role("button", name="Emergency stop…").click()
    dialog = page.locator(".jp-Dialog")
    dialog.get_by_role("button", name="Abort now").click()
    expect(dialog).to_contain_text("have not answered within 6 s")
    dialog.get_by_role("button", name="Close the lab").click()
    expect(side.locator(".mmlab-said")).to_contain_text(
        f"Lab {lab.id} is closed: its keeper did not answer", timeout=40_000
    )
    status = run.status()
    assert (status["state"], status["reason"]) == ("stopped", "the lab was closed; its keeper did not answer")
