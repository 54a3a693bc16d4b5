"""A progress bar that fits where it is shown: rich on terminals, HTML in notebooks, nothing in files and pipes."""

from __future__ import annotations

import html
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mmlab.tracking.record import ENDED, RunRecord

RENEW = 0.4
"""Seconds between updates in a notebook: its server drops messages beyond a rate."""


def in_kernel() -> bool:
    """Whether this process is a Jupyter kernel (IPython is not imported to find out)."""
    shell = current_shell()
    return shell is not None and getattr(shell, "kernel", None) is not None


def current_shell() -> Any | None:
    """The IPython shell of this process, None where there is none."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


class Bar(Protocol):
    """A bar for waiting: a context manager that is told how far the run is."""

    def __enter__(self) -> Bar: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def update(self, done: int, total: int, text: str) -> None:
        """`done` of `total` steps; `text` what else is to be said."""


class Silent:
    """No bar: output goes to a file or a pipe."""

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def update(self, done: int, total: int, text: str) -> None:
        """Say nothing."""


class Terminal:
    """A rich progress bar."""

    def __init__(self, title: str, console: Console) -> None:
        columns = [
            TextColumn(title),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
        ]
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task("", total=None)

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, done: int, total: int, text: str) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=done, total=total or None, description=text)


class Notebook:
    """One line of HTML with a bar, renewed in place; its text stays in the saved notebook."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._handle: Any = None
        self._shown = ("", "")
        self._last = 0.0

    def __enter__(self) -> Bar:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._renew()

    def update(self, done: int, total: int, text: str) -> None:
        """Move the bar, at most every RENEW seconds."""
        words = f"{self._title}: step {done} of {total} {text}"
        bar = f'<progress value="{done}" max="{max(total, 1)}" style="width:18em"></progress> {html.escape(words)}'
        self._shown = (words, bar)
        if time.monotonic() - self._last > RENEW:
            self._renew()

    def _renew(self) -> None:
        from IPython.display import display

        self._last = time.monotonic()
        bundle = {"text/plain": self._shown[0], "text/html": self._shown[1]}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)


def progress_bar(title: str) -> Bar:
    """The bar for where output goes."""
    if in_kernel():
        return Notebook(title)
    console = Console(stderr=True)
    return Terminal(title, console) if console.is_terminal else Silent()


def report_unseen(shell: Any, record: RunRecord, seen: Callable[[], bool]) -> None:
    """Say once, under the next cell, that a run failed, unless somebody has seen it by then (in a kernel)."""

    def after_cell(*_: Any) -> None:
        status = record.status()
        if status["state"] == "failed" and not seen():
            print(f"run {record.id} failed: {status['reason']}; logs are in {record.paths.logs}")
        if status["state"] in ENDED:
            shell.events.unregister("post_run_cell", after_cell)

    shell.events.register("post_run_cell", after_cell)
