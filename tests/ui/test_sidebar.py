"""The sidebar in a real JupyterLab, with a real kernel and real engines: one session of a person, from the first lab to
the emergency stop."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Locator, Page, expect

from mmlab.messages import read_json
from mmlab.messages.files import process_alive
from mmlab.tracking.record import RunRecord
from ui.jupyterlab import (
    BUNDLE,
    TOKEN,
    another_kernel,
    jupyterlab,
    keep_shot,
    kernel_idle,
    kernels,
    run_cell,
    serious,
    wait_for,
    write_notebook,
)
from ui.stage import browser_page

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SIDEBAR = "#mmlab-sidebar"
STEADY = '"train.steps=20000", "parallel.dp=2", "parallel.pp=1", "checkpoint.every_steps=0"'


class Session:
    """A page of JupyterLab with the sidebar, and what a person does there."""

    def __init__(self, page: Page, address: str, folder: Path) -> None:
        self.page = page
        self.address = address
        self.folder = folder
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.side = page.locator(SIDEBAR)

    def open(self, name: str) -> None:
        self.page.goto(f"{self.address}/lab/tree/{name}?token={TOKEN}")
        kernel_idle(self.page)
        if not self.side.is_visible():
            self.page.get_by_role("tab", name=re.compile("labs, runs and ranks")).click()
        expect(self.side).to_be_visible()

    def button(self, name: str, exact: bool = True) -> Locator:
        return self.side.get_by_role("button", name=name, exact=exact)

    def dialog(self, button: str) -> None:
        self.page.locator(".jp-Dialog").get_by_role("button", name=button, exact=True).click()

    def cell(self, code: str) -> None:
        """Type a cell at the end of the notebook and run it."""
        page = self.page
        page.locator(".jp-Notebook").click(position={"x": 3, "y": 3})
        page.keyboard.press("Escape")
        page.keyboard.press("End")
        page.keyboard.press("b")
        run_cell(page, code)

    def state(self) -> str:
        return self.side.locator(".mmlab-view .mmlab-state").inner_text()

    def told(self) -> str:
        """All that the sidebar says, and what the run's own log says."""
        runs = (self.folder / "runs").glob("*/run.json")
        states = [e["state"] for run in runs for e in RunRecord(run.parent).events() if e["kind"] == "state"]
        return f"{self.side.inner_text()!r}; of the run's log: {states[-5:]}"

    def shot(self, name: str) -> None:
        keep_shot(self.page, self.folder / f"{name}.png")

    def run(self) -> RunRecord:
        """The newest run."""
        return RunRecord(max((self.folder / "runs").glob("*/run.json")).parent)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    assert BUNDLE.is_dir(), (
        "the sidebar is not built: pip install -e . with Node on PATH, or npm run build in extensions"
    )
    folder = tmp_path_factory.mktemp("sidebar")
    write_notebook(folder / "work.ipynb", "")
    with jupyterlab(folder, "JupyterLab Dark") as address, browser_page(1500, 1000) as page:
        try:
            yield Session(page, address, folder)
        finally:
            close_labs(folder)


def close_labs(folder: Path) -> None:
    """End labs that a failed test left: their keepers, which end all else."""
    for state in (folder / "runtime").glob("mmlab/labs/*/lab.json"):
        keeper = (read_json(state) or {}).get("keeper")
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(keeper["pid"])
            process.terminate()
            process.wait(30)


def test_a_session_from_the_first_lab_to_the_emergency_stop(session: Session) -> None:
    page, side = session.page, session.side
    session.open("work.ipynb")
    processes = start_a_lab_and_attach(session)
    record = train(session)
    steer(session, record)
    kill_a_rank(session, record)
    emergency_stop_while_a_cell_is_busy(session, record)

    page.reload()
    page.locator(".jp-Notebook").wait_for(timeout=60_000)
    expect(side.locator(".mmlab-view")).to_contain_text("stopped")
    restart_kernel(page)
    session.cell("import mmlab\nmmlab.Lab.attach().run")
    cell = page.locator(".jp-CodeCell", has_text="mmlab.Lab.attach().run")  # others may have been saved with a picture
    cell.locator(".jp-OutputArea-output img").wait_for(timeout=60_000)

    side.get_by_role("button", name=re.compile("^Close lab")).click()
    session.dialog("Close the lab")
    expect(side.get_by_text("No lab lives.")).to_be_visible()
    wait_for(lambda: not [process for process in processes if process_alive(*process)])
    own = [error for error in session.errors if not error.startswith("Canceled future for kernel_info")]
    assert own == []  # the one left out is JupyterLab's, of a restart while it waits for a busy kernel


def start_a_lab_and_attach(session: Session) -> list[tuple[int, float]]:
    """A lab from the sidebar, attached to by a cell that the sidebar puts into the notebook; its processes."""
    page, side = session.page, session.side
    expect(side.get_by_text("No lab lives.")).to_be_visible()
    session.button("Start a lab…").click()
    page.locator(".jp-Dialog input").fill("2")
    session.dialog("Start")
    said = side.locator(".mmlab-said")
    expect(said).to_contain_text("is starting")
    expect(side.locator(".mmlab-lab")).to_contain_text("ready · 2 of 2 engines", timeout=120_000)
    expect(said).to_have_text("")
    grow(session, "1", "only grows")
    grow(session, "3", "grows to 3 engines")
    expect(side.locator(".mmlab-lab")).to_contain_text("ready · 3 of 3 engines", timeout=120_000)
    (lab,) = (session.folder / "runtime" / "mmlab" / "labs").iterdir()
    clusters = page.request.get(f"{session.address}/ipyparallel/clusters?token={TOKEN}").json()
    assert f"mmlab-{lab.name}" in [
        one["cluster"]["cluster_id"] for one in clusters
    ]  # so ipyparallel's sidebar calls it
    page.locator(".jp-CodeCell .cm-content").first.click()
    side.get_by_role("button", name=re.compile("^Attach lab")).click()
    expect(page.locator(".jp-CodeCell").first).to_contain_text("mmlab.Lab.attach")
    expect(page.locator(".jp-OutputArea").first).to_contain_text("3 of 3 up")
    expect(said).to_have_text("")
    return lab_processes(session.folder)


def grow(session: Session, engines: str, said: str) -> None:
    """Ask the lab for more engines, so many in all."""
    session.side.get_by_role("button", name=re.compile("^More engines for lab")).click()
    session.page.locator(".jp-Dialog input").fill(engines)
    session.dialog("Start them")
    expect(session.side.locator(".mmlab-said")).to_contain_text(said)


def train(session: Session) -> RunRecord:
    """A run from a cell, its dashboard, and its ranks in the sidebar; the learning rate moved."""
    session.cell(f'run = lab.train(mmlab.Plan.preset("laptop").with_({STEADY}))\nrun')
    session.page.locator(".mm-board").wait_for(timeout=60_000)
    wait_for(lambda: "running" in session.state(), 180, session.told)
    wait_for(lambda: re.search(r"step [1-9]", session.state()), 60, session.told)
    expect(session.side.locator(".mmlab-ranks tbody tr")).to_have_count(3)
    rate = session.page.get_by_label("Base learning rate of language")
    rate.fill("5e-4")
    rate.press("Enter")
    record = session.run()
    wait_for(lambda: record.live_plan().train.language.lr == 5e-4)
    return record


def steer(session: Session, record: RunRecord) -> None:
    """Pause, three steps, a checkpoint, other compression, back to the checkpoint."""
    session.button("Pause").click()
    wait_for(lambda: "paused" in session.state(), seen=session.state)
    paused = record.status()["step"]
    session.button("Step").click()
    said = session.side.locator(".mmlab-said")  # it stays for 15 s, in which three steps may not be done
    expect(said).to_contain_text(re.compile(r"step: applied after step \d+ on 3 ranks"))
    wait_for(lambda: record.status()["step"] == paused + 3, 60)
    wait_for(lambda: f"step {paused + 3}" in session.state().replace(",", ""))
    status = session.page.locator("#jp-main-statusbar .mmlab-status")
    expect(status).to_contain_text(re.compile(r"paused · \d+/20000 · loss"))
    session.shot("sidebar-dark")
    assert serious(session.page, SIDEBAR) == []

    session.button("Checkpoint").click()
    wait_for(record.checkpoints)
    session.cell('run.compress("language", "int8")')
    wait_for(lambda: record.live_plan().communication.language.compressor == "int8")
    session.button("Resume").click()
    wait_for(lambda: record.status()["step"] > paused + 5, 60)
    session.cell(f"run.restore(step={paused + 3})")
    wait_for(lambda: any(event["kind"] == "restore" for event in record.events()), 60)


def lab_processes(folder: Path) -> list[tuple[int, float]]:
    """Processes of the only lab, and when each started."""
    (state,) = (folder / "runtime").glob("mmlab/labs/*/lab.json")
    return [(process["pid"], process["started"]) for process in read_json(state)["processes"]]


def kill_a_rank(session: Session, record: RunRecord) -> None:
    """A rank's process ends: the sidebar names it; the run recovers."""
    before = record.info["generation"]
    victim = next(rank for rank in record.status()["ranks"] if rank["rank"] == 1)
    psutil.Process(victim["pid"]).kill()
    expect(session.side.locator(".mmlab-reason")).to_contain_text(
        re.compile(rf"rank 1 \({re.escape(victim['role'])}\)")
    )
    session.shot("sidebar-killed")
    wait_for(lambda: record.info["generation"] > before and "running" in session.state(), 180)


def emergency_stop_while_a_cell_is_busy(session: Session, record: RunRecord) -> None:
    """The kernel sleeps in a cell; the run is aborted all the same."""
    page = session.page
    session.cell("import time; time.sleep(600)")
    page.get_by_text(re.compile(r"\| Busy")).wait_for(timeout=60_000)
    began = time.monotonic()
    session.button("Emergency stop…").click()
    session.shot("emergency")
    session.dialog("Abort now")
    wait_for(lambda: record.status()["state"] == "stopped")
    print(f"aborted {time.monotonic() - began:.1f} s after the click")
    expect(session.side.locator(".mmlab-said")).to_contain_text("stopped at step")
    expect(page.locator(".jp-InputPrompt", has_text="[*]:")).to_have_count(1)  # the cell sleeps on
    session.button("Show in notebook").click()
    expect(session.side.locator(".mmlab-said")).to_contain_text("kernel is busy: Shift+Enter")


def restart_kernel(page: Page) -> None:
    """Restart the kernel, whose cell is busy, from the toolbar."""
    before = kernels()
    page.locator('[data-command="notebook:restart-kernel"], button[title*="Restart the kernel"]').first.click()
    page.locator(".jp-Dialog").get_by_role("button", name="Confirm Kernel Restart").click()
    another_kernel(page, before)
