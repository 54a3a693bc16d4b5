"""A part in a real browser without Jupyter: its widget's state and messages go to a bare page and back.

Starts in about two seconds, where JupyterLab takes twenty, and is deterministic: messages pass when `pump` is called.
"""

from __future__ import annotations

import base64
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Page, sync_playwright

from mmlab.ui.part import Part
from mmlab.ui.view import View, code

PAGE = """<!doctype html><html lang="en"><head><meta charset="utf-8"><title>stage</title></head>
<body data-jp-theme-light="true"><main id="cell"></main></body></html>"""
MOUNT = """async ([esm, state, shared]) => {
  const listeners = {};
  const decode = (text) => new DataView(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
  const model = {
    get: (key) => state[key],
    set: (key, value) => { state[key] = value; },
    save_changes: () => {},
    on: (name, listener) => { (listeners[name] ??= new Set()).add(listener); },
    off: (name, listener) => { listeners[name]?.delete(listener); },
    send: (message) => { window.toKernel(message); },
    widget_manager: { get_model: async () => ({ get: (key) => shared[key] }) },
  };
  window.fromKernel = (message, buffers) => {
    listeners["msg:custom"]?.forEach((listener) => listener(message, buffers.map(decode)));
  };
  const url = URL.createObjectURL(new Blob([esm], { type: "text/javascript" }));
  const widget = (await import(url)).default();
  window.dispose = [await widget.initialize({ model })];
  window.render = async () => { // one more view
    const el = document.createElement("div");
    document.getElementById("cell").append(el);
    window.dispose.push(await widget.render({ model, el }));
  };
  window.remount = async () => {
    document.getElementById("cell").replaceChildren();
    await window.render();
  };
  await window.remount();
}"""
DARK = """:root { --jp-layout-color1: #111; --jp-layout-color2: #212121; --jp-border-color2: #616161;
--jp-ui-font-color1: #fff; --jp-ui-font-color2: #bdbdbd; } body { background: #111; }"""


class Stage:
    """One part in one page. `sent` are the messages to the page: (content, buffers)."""

    def __init__(self, page: Page, part: Part, dark: bool = False) -> None:
        self.page = page
        self.part = part
        self.errors: list[str] = []
        self.sent: list[tuple[dict[str, Any], list[bytes]]] = []
        self._delivered = 0
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", lambda said: self.errors.append(said.text) if said.type == "error" else None)
        page.on("close", lambda _: part.close())  # its thread would go on looking, and be heard by later tests
        page.expose_function("toKernel", lambda message: part._heard(None, message, []))
        page.set_content(PAGE)
        if dark:
            page.add_style_tag(content=DARK)
        view = part.view
        view.send = self._take  # type: ignore[method-assign]  this one object's wire
        state = {"code": view.code, "layout_": view.layout_, "still": view.still, "language": view.language}
        page.evaluate(MOUNT, [View._esm, state, {"packed": code().packed}])

    def _take(self, content: Any, buffers: Any = None) -> None:
        self.sent.append((content, [bytes(buffer) for buffer in buffers or []]))

    def pump(self) -> None:
        """Hand over what the part has sent since."""
        while self._delivered < len(self.sent):
            content, buffers = self.sent[self._delivered]
            self._delivered += 1
            coded = [base64.b64encode(buffer).decode() for buffer in buffers]
            self.page.evaluate("([message, buffers]) => window.fromKernel(message, buffers)", [content, coded])

    def until(self, condition: Callable[[], Any], seconds: float = 60.0) -> None:
        """Let messages pass until the condition holds; fails with the page's errors and text."""
        end = time.monotonic() + seconds
        while True:
            self.pump()
            if condition():
                return
            shown = self.page.locator("#cell").inner_text()
            assert time.monotonic() < end, f"it did not happen in time; errors: {self.errors}; page:\n{shown}"
            self.page.wait_for_timeout(50)

    def shot(self, path: Path | str) -> None:
        """A screenshot of the cell, to be looked at; also kept in the folder that MMLAB_SHOTS names."""
        self.pump()
        self.page.locator("#cell").screenshot(path=path)
        if folder := os.environ.get("MMLAB_SHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, Path(folder) / Path(path).name)


@contextmanager
def browser_page(width: int = 1200, height: int = 900) -> Iterator[Page]:
    """A page of the installed Chromium (else of Playwright's own)."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu"], timeout=120_000
        )
        yield browser.new_page(viewport={"width": width, "height": height})
        browser.close()
