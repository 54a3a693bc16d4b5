"""Watching a run from a terminal: a progress bar, or plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmlab.cli.shared import console

if TYPE_CHECKING:
    from rich.console import Console

    from mmlab.ui.feed import Feed

POLL = 0.2
"""Seconds between looks at the event log."""
LINES = 20
"""Progress lines of a whole run where output is no terminal."""
LONGEST_SILENCE = 10.0
"""Seconds after which a further line comes anyway, if steps were done."""


def follow_run(run_dir: Path, lab_status: Callable[[], str] | None = None) -> Feed:
    """Show a run's progress until it has ended; the feed then holds all of it. `lab_status`: text while it starts."""
    from mmlab.ui.feed import Feed

    feed = Feed(run_dir)
    out = console()
    if out.is_terminal:
        _follow_bar(feed, out, lab_status)
    else:
        _follow_lines(feed, out, lab_status)
    return feed


def rates(feed: Feed) -> str:
    """Loss and throughput of the last step as text."""
    if not feed.last:
        return ""
    text = f"loss {feed.last['loss']:.3f}  {feed.last['tokens_per_s']:,.0f} tokens/s"
    images = feed.last.get("images_per_s")
    return f"{text}  {images:,.1f} images/s" if images is not None else text


def _turn(feed: Feed) -> bool:
    """One look at the run; whether it goes on."""
    feed.read()
    feed.look()
    if feed.ended:
        feed.read()
    return not feed.ended


def _follow_bar(feed: Feed, out: Console, lab_status: Callable[[], str] | None) -> None:
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns: list[Any] = [
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TextColumn("{task.fields[rates]}"),
        TimeRemainingColumn(),
    ]
    with Progress(*columns, console=out, transient=False) as bar:
        task = bar.add_task("queued", total=feed.steps, rates="")
        goes_on = True
        while goes_on:
            goes_on = _turn(feed)
            waiting = feed.state in ("queued", "starting")
            note = lab_status() if waiting and lab_status is not None else rates(feed)
            bar.update(task, description=feed.doing, completed=feed.step, total=feed.steps, rates=note)
            if goes_on:
                time.sleep(POLL)


def _follow_lines(feed: Feed, out: Console, lab_status: Callable[[], str] | None) -> None:
    doing, note, reason, next_step, last_step, last_line = "", "", "", 1, 0, time.monotonic()
    goes_on = True
    while goes_on:
        goes_on = _turn(feed)
        lines = []
        late = time.monotonic() - last_line > LONGEST_SILENCE and feed.step > 0
        if feed.step >= next_step or (late and feed.step >= last_step + 1):
            last_line, last_step = time.monotonic(), feed.step
            lines.append(f"step {feed.step}/{feed.steps}  {rates(feed)}")
            next_step = feed.step + max(1, feed.steps // LINES)
        if feed.doing != doing:
            doing = feed.doing
            lines.insert(0 if doing == "running" else len(lines), doing)
        if doing == "starting" and feed.reason != reason:
            reason = feed.reason
            lines.append(reason)
        if lab_status is not None and doing in ("queued", "starting") and (text := lab_status()) != note:
            note = text
            lines.append(note)
        for line in lines:
            out.print(line, markup=False)
        if goes_on:
            time.sleep(POLL)
