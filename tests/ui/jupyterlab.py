"""A real JupyterLab for browser tests: its server, and what a person does in its page."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import nbformat
import psutil
from jupyter_process import serving
from playwright.sync_api import Page, expect

ROOT = Path(__file__).resolve().parents[2]
BUNDLE = ROOT / "extensions" / "labextension"
"""The sidebar, where it has been built in this checkout (an editable installation does)."""
TOKEN = "secret"
KERNEL = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}


@contextmanager
def jupyterlab(
    folder: Path, theme: str = "JupyterLab Light", base: str = "", port: int = 0, **environment: str
) -> Iterator[str]:
    """JupyterLab with `folder` as its root and all of its own files below it; its address, without a slash at its end.

    `base` is put before all paths ("/user/x"), as a hub does; `port` is that of a server that has ended.
    """
    settings = folder / "settings" / "@jupyterlab" / "apputils-extension"
    settings.mkdir(parents=True, exist_ok=True)
    (settings / "themes.jupyterlab-settings").write_text(json.dumps({"theme": theme}))
    (settings / "notification.jupyterlab-settings").write_text(json.dumps({"fetchNews": "false"}))
    documents = folder / "settings" / "@jupyterlab" / "docmanager-extension"
    documents.mkdir(parents=True, exist_ok=True)  # notebooks are saved when a test does so, not after two minutes
    (documents / "plugin.jupyterlab-settings").write_text(json.dumps({"autosave": False}))
    more = {"IPYTHONDIR": str(folder / "ipython"), "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings")}
    more["MMLAB_RUNS"] = str(folder / "runs")  # tests of labs leave theirs in the environment until the session ends
    more |= sidebar_of_checkout(folder) | environment
    options = [f"--ServerApp.base_url={base}/"] if base else []
    with serving("jupyterlab", folder, folder, TOKEN, options, more, port) as port:
        yield f"http://127.0.0.1:{port}{base}"


def sidebar_of_checkout(folder: Path) -> dict[str, str]:
    """Environment in which Jupyter takes the extension of this checkout, where it has been built, before another."""
    if not (BUNDLE / "package.json").is_file():
        return {}
    (folder / "share" / "labextensions").mkdir(parents=True, exist_ok=True)
    if not (folder / "share" / "labextensions" / "mmlab").is_symlink():
        (folder / "share" / "labextensions" / "mmlab").symlink_to(BUNDLE)
    return {"JUPYTER_PATH": str(folder / "share"), "JUPYTER_CONFIG_PATH": str(ROOT / "jupyter-config")}


def in_chinese(folder: Path) -> dict[str, str]:
    """Have JupyterLab in `folder` speak Chinese; the environment in which it finds this checkout's catalogue."""
    settings = folder / "settings" / "@jupyterlab" / "translation-extension"
    settings.mkdir(parents=True)
    (settings / "plugin.jupyterlab-settings").write_text(json.dumps({"locale": "zh_CN"}))
    entry = folder / "entry" / "mmlab_of_checkout-0.dist-info"
    entry.mkdir(parents=True)
    (entry / "METADATA").write_text("Metadata-Version: 2.1\nName: mmlab-of-checkout\nVersion: 0\n")
    (entry / "entry_points.txt").write_text("[jupyterlab.locale]\nmmlab = mmlab.server\n")
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), str(entry.parent)])}


def write_notebook(path: Path, *cells: str) -> None:
    """A notebook of code cells."""
    made = [nbformat.v4.new_code_cell(cell) for cell in cells]
    nbformat.write(nbformat.v4.new_notebook(cells=made, metadata=KERNEL), path)


def open_notebook(page: Page, address: str, name: str) -> None:
    """Open a notebook of the root folder alone in a page, and wait until its kernel is idle."""
    page.goto(f"{address}/doc/tree/{name}?token={TOKEN}")
    kernel_idle(page)


def kernel_idle(page: Page) -> None:
    """Wait until the status bar says that the kernel is idle."""
    page.get_by_text(re.compile(r"\| Idle")).wait_for(timeout=60_000)


def kernels() -> set[int]:
    """Processes of the kernels of this process's servers."""
    own = {child.pid for child in psutil.Process().children(recursive=True)}
    found = psutil.process_iter(["cmdline"])  # None where a process has just ended
    return {one.pid for one in found if one.pid in own and "ipykernel_launcher" in (one.info["cmdline"] or [])}


def another_kernel(page: Page, before: set[int]) -> None:
    """Wait until a kernel that was not there before is idle: of the old one the status bar may have said so still."""
    wait_for(lambda: kernels() - before)
    kernel_idle(page)


def run_cell(page: Page, code: str) -> None:
    """Type code into the active cell, in command mode until now, and run it once all of it is there: a notebook makes a
    cell's editor when it comes into sight, and keys go nowhere until then."""
    page.keyboard.press("Enter")
    editor = page.locator(".jp-Notebook .jp-Cell.jp-mod-active .cm-content")
    expect(editor).to_be_focused()
    page.keyboard.insert_text(code)
    expect(editor).to_contain_text(code.splitlines()[-1])
    page.keyboard.press("Shift+Enter")


def save(page: Page, path: Path) -> None:
    """Save the notebook at hand, and wait until the file is whole: Jupyter writes it in place."""
    before = path.stat().st_mtime_ns

    def whole() -> bool:
        try:
            return path.stat().st_mtime_ns != before and bool(nbformat.read(path, as_version=4))
        except ValueError:
            return False

    page.keyboard.press("Escape")
    page.keyboard.press("Control+s")
    wait_for(whole)


def wait_for(condition: Callable[[], object], seconds: float = 60.0, seen: Callable[[], object] | None = None) -> None:
    """Wait for a condition; fails after that time with what the condition, or `seen`, last gave, and all that `seen`
    gave before."""
    end = time.monotonic() + seconds
    history: list[str] = []
    while True:
        met = condition()
        if met:
            return
        now = repr(seen() if seen else met)
        if history[-1:] != [now]:
            history.append(now)
        assert time.monotonic() < end, f"it did not happen in {seconds:g} s; seen, oldest first: {history[-20:]}"
        time.sleep(0.1)


def keep_shot(page: Page, path: Path) -> None:
    """A screenshot of the page, also kept in the folder that MMLAB_SHOTS names."""
    page.screenshot(path=path)
    if folder := os.environ.get("MMLAB_SHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, Path(folder) / path.name)


def serious(page: Page, selector: str) -> list[str]:
    """Serious and critical faults of what a selector names, by axe."""
    page.evaluate((files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = page.evaluate(
        f"() => axe.run('{selector}', {{resultTypes: ['violations']}}).then((r) => r.violations)"
    )
    return [
        f"{fault['id']}: {node['html'][:200]}: {node['failureSummary']}"
        for fault in found
        if fault["impact"] in ("serious", "critical")
        for node in fault["nodes"]
    ]
