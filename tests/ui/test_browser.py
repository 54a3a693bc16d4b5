"""The dashboard in JupyterLab, driven by a real browser: points move, buttons steer, a reloaded page catches up."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import psutil
import pytest
from playwright.sync_api import Page, expect

from ui.jupyterlab import (
    another_kernel,
    jupyterlab,
    keep_shot,
    kernel_idle,
    kernels,
    open_notebook,
    save,
    wait_for,
    write_notebook,
)
from ui.stage import browser_page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
BOARD = ".mm-board"


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Path]:
    """A synthetic run that a process of its own plays, about nine steps a second; its folder."""
    command = [sys.executable, str(Path(__file__).with_name("synthetic.py")), str(tmp_path / "runs"), "3000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield Path(process.stdout.readline().strip())
        process.terminate()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Starts JupyterLab in the test's folder, in a theme; the address."""
    with contextlib.ExitStack() as stack:
        yield lambda theme="JupyterLab Light": stack.enter_context(jupyterlab(tmp_path, theme))


@pytest.fixture
def page() -> Iterator[Page]:
    with browser_page(1600, 1100) as page:
        yield page


def show(page: Page, address: str, folder: Path, live: Path) -> None:
    """Open a notebook and run its one cell, which shows the run."""
    write_notebook(folder / "live.ipynb", f"import mmlab\n\nmmlab.Run.open({str(live)!r})")
    open_notebook(page, address, "live.ipynb")
    page.locator(".jp-CodeCell .cm-content").first.click()
    page.keyboard.press("Shift+Enter")
    page.locator(BOARD).wait_for(timeout=60_000)
    expect(page.locator(f"{BOARD} .mm-state")).to_contain_text("running")


def step_of(page: Page) -> int:
    """The step that the board shows; -1 while it has no data (a page that was just loaded)."""
    text = page.locator(f"{BOARD} .mm-line").inner_text()
    found = re.search(r"step ([\d,]+|–) of", text)
    assert found, text
    return -1 if found[1] == "–" else int(found[1].replace(",", ""))


def curve(page: Page) -> str:
    """The drawn loss, as an image."""
    return str(page.locator(f"{BOARD} canvas").first.evaluate("(canvas) => canvas.toDataURL()"))


def test_points_move_buttons_steer_and_a_reload_catches_up(
    server: Callable[..., str], page: Page, tmp_path: Path, live: Path
) -> None:
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    show(page, server(), tmp_path, live)
    before, drawn = step_of(page), curve(page)
    wait_for(lambda: step_of(page) > before + 5)
    wait_for(lambda: curve(page) != drawn)
    height = page.locator(BOARD).bounding_box()["height"]  # type: ignore[index]
    page.screenshot(path=tmp_path / "wide.png")

    said = page.locator(f"{BOARD} .mm-said")
    page.locator(f"{BOARD} button", has_text="Pause").click()
    expect(said).to_contain_text(re.compile(r"pause: applied after step \d+ on 6 ranks"))
    expect(page.locator(f"{BOARD} .mm-state")).to_contain_text("paused")
    paused = step_of(page)
    time.sleep(1.0)
    assert step_of(page) == paused
    rate = page.get_by_label("Base learning rate of language")
    rate.fill("5e-4")
    rate.press("Enter")
    expect(said).to_contain_text("set train.language.lr = 5e-4: applied")
    page.locator(f"{BOARD} button", has_text="Resume").click()
    wait_for(lambda: step_of(page) > paused)
    assert page.locator(BOARD).bounding_box()["height"] == height  # type: ignore[index]

    save(page, tmp_path / "live.ipynb")
    page.reload()
    page.locator(BOARD).wait_for(timeout=60_000)
    wait_for(lambda: step_of(page) > paused)
    after = step_of(page)
    wait_for(lambda: step_of(page) > after)
    expect(page.get_by_label("Base learning rate of language")).to_have_value("5e-4")
    page.locator(f"{BOARD} button", has_text="Pause").click()
    expect(page.locator(f"{BOARD} .mm-state")).to_contain_text("paused")
    assert errors == []
    its_kernel_is_killed(page, tmp_path)


def its_kernel_is_killed(page: Page, folder: Path) -> None:
    """After a reload the last picture stands where JupyterLab alone says "model not found"; a new kernel is live."""
    before = kernels()
    [kernel] = before
    psutil.Process(kernel).kill()
    page.get_by_role("button", name="Ok").click(timeout=60_000)  # "it will restart automatically"
    another_kernel(page, before)
    save(page, folder / "live.ipynb")
    page.reload()
    picture = page.locator(".mmlab-outlives img")
    picture.wait_for(timeout=60_000)
    expect(page.locator(".mmlab-outlives")).to_contain_text("This is how it stood last")
    kernel_idle(page)
    page.wait_for_timeout(2_000)  # its manager of widgets has come meanwhile, and asked
    assert picture.is_visible()
    assert not page.get_by_text("Error displaying widget").is_visible()
    keep_shot(page, folder / "killed.png")
    page.locator(".jp-CodeCell .cm-content").first.click()
    page.keyboard.press("Shift+Enter")
    expect(page.locator(f"{BOARD} .mm-state")).to_contain_text("paused")
    expect(picture).to_have_count(0)


def test_stop_leaves_a_picture_in_the_saved_notebook(
    server: Callable[..., str], page: Page, tmp_path: Path, live: Path
) -> None:
    show(page, server("JupyterLab Dark"), tmp_path, live)
    expect(page.locator(BOARD)).to_have_class(re.compile("mm-dark"))
    page.set_viewport_size({"width": 690, "height": 1400})
    wait_for(lambda: page.locator(BOARD).evaluate("(board) => board.scrollWidth <= board.clientWidth"))
    page.screenshot(path=tmp_path / "narrow-dark.png")
    page.locator(f"{BOARD} button.mm-stop").dblclick()  # the second click within four seconds
    expect(page.locator(".mmlab-outlives, .mm-board")).to_have_count(
        0
    )  # before it leaves, its last picture may be seen
    expect(page.locator(".jp-OutputArea-output img")).to_be_visible()
    save(page, tmp_path / "live.ipynb")
    outputs = nbformat.read(tmp_path / "live.ipynb", as_version=4).cells[0].outputs
    assert [set(output.data) for output in outputs] == [{"image/png", "text/plain"}]
    assert "stopped" in outputs[0].data["text/plain"]
    assert (tmp_path / "live.ipynb").stat().st_size < 300_000
