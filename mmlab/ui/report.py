"""The report of a run: one HTML file that needs no network, made from the run's folder alone."""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from mmlab.errors import MmlabError
from mmlab.messages import ENDED, Event, write_atomic
from mmlab.plan.schedule import measured_svg
from mmlab.ui import svg
from mmlab.ui.feed import Feed
from mmlab.ui.picture import BLUE, ORANGE, PALE
from mmlab.ui.scales import smooth
from mmlab.ui.words import clock, command_text, duration, event_text, number, plan_text

SAMPLES = 8
"""Held-out pictures shown."""
LISTED = ("state", "lineage", "checkpoint", "restore", "relayout", "notice", "bad_image", "warning")
"""Kinds of events in the list of events."""


def write_report(run_dir: Path | str) -> Path:
    """Write `report.html` into a run's folder; its path. MmlabError where it is no run or cannot be written."""
    feed = Feed(run_dir)
    feed.read()
    feed.look()
    target = feed.paths.root / "report.html"
    try:
        write_atomic(target, render(feed).encode())
    except OSError as error:
        raise MmlabError(f"{target}: the report cannot be written ({error.strerror})") from None
    return target


def render(feed: Feed) -> str:
    """The report as HTML."""
    style = (files("mmlab.ui") / "static" / "report.css").read_text(encoding="utf-8")
    sections = (
        _head(feed),
        _curves(feed),
        _held_out(feed),
        _pictures(feed),
        _phases(feed),
        _traffic(feed),
        _compression(feed),
        _schedule(feed),
        _section("Placement of ranks", f'<div class="wide">{feed.plan.layout().svg()}</div>'),
        _commands(feed),
        _events(feed),
        _plan(feed),
    )
    title = f"{escape(feed.paths.root.name)}: mmlab report"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta name="viewport" content="width=device-width,initial-scale=1"><style>{style}</style></head>'
        f"<body><main>{''.join(sections)}</main></body></html>\n"
    )


def _section(title: str, body: str, note: str = "") -> str:
    note = f'<p class="note">{note}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{note}{body}</section>"


def _head(feed: Feed) -> str:
    state = escape(feed.state)
    reason = f'<p class="reason">{escape(feed.reason)}</p>' if feed.reason else ""
    tiles = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(label)}</span></div>' for label, value in figures(feed)
    )
    return (
        f'<header><h1>{escape(feed.paths.root.name)} <span class="state {state}">{state}</span></h1>'
        f'<p class="note">{escape(plan_text(feed.plan))}</p>{reason}<div class="tiles">{tiles}</div></header>'
    )


def figures(feed: Feed) -> list[tuple[str, str]]:
    """The figures on top: label and value."""
    last = feed.last
    loss = last.get("loss")
    rows = [("steps", f"{feed.step:,} of {feed.steps:,}")]
    if loss is not None and feed.first_loss is not None:
        rows.append(("loss, first to last step", f"{number(feed.first_loss)} → {number(loss)}"))
    if feed.evals:
        rows.append(("held-out loss", number(feed.evals[-1].get("loss"), 4)))
        ratio = ratio_of(feed.evals[-1])
        if ratio is not None:
            rows.append(("held-out loss, images swapped", f"{ratio:.2f} ×"))
    rates = _typical(feed)
    rows += [("tokens/s (median)", number(rates[0])), ("images/s (median)", number(rates[1]))]
    times = [event["t"] for event in feed.states if event.get("state") in ("running", *ENDED)]
    if len(times) > 1:
        rows.append(("from first step to end", duration(times[-1] - times[0])))
    return rows


def _typical(feed: Feed) -> list[float | None]:
    medians = []
    for name in ("tokens_per_s", "images_per_s"):
        values = sorted(feed.curves[name].points()[1])
        medians.append(values[len(values) // 2] if values else None)
    return medians


def ratio_of(evaluation: Event) -> float | None:
    """Held-out loss with images swapped between samples over that with the right ones; None without images."""
    loss, swapped = evaluation.get("loss"), evaluation.get("loss_swapped")
    return swapped / loss if loss and swapped is not None else None


def _curves(feed: Feed) -> str:
    x, y = feed.curves["loss"].points()
    loss = [svg.Curve("loss", x, y, PALE, 1.2), svg.Curve("smoothed", x, smooth(y), BLUE, 2.2)]
    if len(feed.curves["held_out"]):
        loss.append(svg.held_out_curve(*feed.curves["held_out"].points()))
    tokens = svg.Curve("tokens/s", *feed.curves["tokens_per_s"].points(), BLUE)
    images = svg.Curve("images/s", *feed.curves["images_per_s"].points(), ORANGE)
    charts = (
        ("Loss by step", svg.line_chart(loss, "loss by step")),
        ("Tokens a second by step", svg.line_chart([tokens], "tokens a second by step", from_zero=True)),
        ("Images a second by step", svg.line_chart([images], "images a second by step", from_zero=True)),
    )
    return "".join(
        f'<section class="{"half" if index == 0 else "quarter"}"><h2>{title}</h2>{chart}</section>'
        for index, (title, chart) in enumerate(charts)
    ).join(('<div class="charts">', "</div>"))


def _held_out(feed: Feed) -> str:
    if not feed.evals:
        return ""
    rows = [
        (
            f"{event.get('step', 0):,}",
            number(event.get("loss"), 4),
            number(event.get("loss_swapped"), 4),
            "-" if (ratio := ratio_of(event)) is None else f"{ratio:.2f} ×",
        )
        for event in feed.evals
    ]
    note = (
        "The loss on samples that were not trained on, with their own images and with images swapped between samples. "
        "A ratio well above 1 says that the model uses what it sees."
    )
    head = ("step", "loss with the right images", "with images swapped", "ratio")
    return _section("Do the images matter?", _table(head, rows[-12:]), note)


def _pictures(feed: Feed) -> str:
    items = feed.samples.get("items") or []
    if not items:
        return ""
    folder = feed.paths.samples / Path(feed.samples["folder"]).name
    cards = "".join(_card(folder, item) for item in items[:SAMPLES])
    note = f"Pictures that were not trained on, and what the model wrote after step {feed.samples.get('step')}."
    return _section("What the model sees", f'<div class="cards">{cards}</div>', note)


def _card(folder: Path, item: dict[str, Any]) -> str:
    try:
        data = base64.b64encode((folder / Path(item["image"]).name).read_bytes()).decode()
        image = f'<img alt="held-out picture" src="data:image/png;base64,{data}">'
    except OSError:
        image = '<div class="missing">no picture</div>'
    text, truth = str(item.get("text", "")).strip(), str(item.get("truth", "")).strip()
    right = " right" if text == truth else ""
    return (
        f'<figure class="card">{image}<figcaption><span class="ask">{escape(str(item.get("prompt", "")))}</span>'
        f'<span class="said{right}"><i>model</i> {escape(text) or "(nothing)"}</span>'
        f'<span class="truth"><i>truth</i> {escape(truth)}</span></figcaption></figure>'
    )


def _phases(feed: Feed) -> str:
    phases = feed.phases()
    if not phases:
        return ""
    note = "Mean of the last steps. Violet and blue compute, orange waits for or moves data between ranks."
    return _section(
        "Time per phase for each rank", f'<div class="wide">{svg.phase_chart(phases, feed.roles())}</div>', note
    )


def _traffic(feed: Feed) -> str:
    table = feed.record.traffic()
    if not table.rows:
        return ""
    note = (
        f"Mean of the last {table.steps} steps, all ranks together. Under way: how long gradients were being reduced, "
        "on the slowest rank; waited: how much of it backward did not hide."
    )
    return _section("Communication", _table(table.header, table.cells), note)


def _compression(feed: Feed) -> str:
    table = feed.record.compression()
    if all(row.compressor == "none" for row in table.rows):
        return ""
    note = (
        "Mean of the last steps with the compressor in force, all ranks together. Left out: what error feedback sends "
        "later; error: of the reduced gradient relative to one reduced without compression, where measured."
    )
    below = f" {table.below[0].upper()}{table.below[1:]}." if table.below else ""
    return _section("Compressed gradients", _table(table.header, table.cells), note + below)


def _schedule(feed: Feed) -> str:
    planned = f'<div class="wide">{feed.plan.schedule().svg()}</div>'
    traces = feed.record.traces()
    if not traces:
        return _section("Pipeline schedule", planned, "As planned; no step was traced.")
    step = next(iter(traces.values()))["step"]
    measured = measured_svg(feed.plan, list(traces.values()), f"{feed.plan.name}: step {step}, as measured")
    note = "Above as planned (costs estimated from operation counts), below as measured in one traced step."
    return _section("Pipeline schedule", f'{planned}<div class="wide">{measured}</div>', note)


def _commands(feed: Feed) -> str:
    if not feed.commands:
        return _section("Commands", '<p class="note">None was given.</p>')
    rows = [
        (
            clock(event),
            command_text(event.get("verb", ""), event.get("args") or {}),
            "applied" if event.get("ok") else "refused",
            str(event.get("step", "")),
            str(len(event.get("ranks") or [])),
            event.get("message") or "",
        )
        for event in feed.commands
    ]
    return _section("Commands", _table(("time", "command", "outcome", "after step", "ranks", "note"), rows))


def _events(feed: Feed) -> str:
    rows = [(clock(event), event_text(event)) for event in feed.recent if event.get("kind") in LISTED]
    return _section("Events", _table(("time", "event"), rows))


def _plan(feed: Feed) -> str:
    made = time.strftime("%Y-%m-%d %H:%M")
    toml = feed.paths.plan.read_text(encoding="utf-8")
    return (
        f"<section><details><summary>The plan</summary><pre>{escape(toml)}</pre></details>"
        f'<p class="note">Written {made} by mmlab from {escape(feed.paths.root.name)}.</p></section>'
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    heads = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'
