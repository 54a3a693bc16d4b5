"""The report: self-contained, with everything that the run's folder says."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mmlab.errors import MmlabError
from mmlab.messages import EventLog
from mmlab.ui.report import write_report
from ui.synthetic import NAMES, SyntheticRun


class Page(HTMLParser):
    """Collects what a browser would fetch, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attributes if name in ("src", "href", "xlink:href", "srcset")]

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def says(self) -> str:
        return " ".join(" ".join(self.text).split())


@pytest.fixture
def whole(started: SyntheticRun) -> SyntheticRun:
    """A finished run with everything that a report can show."""
    started.train(60)
    started.evaluate()
    started.events.emit(
        "command", id="1", verb="set", args={"values": {"train.language.lr": 1e-4}}, ok=True, ranks=[0, 1], message="",
        step=60,
    )  # fmt: skip
    started.events.emit("bad_image", sample="shard-1/<b>7</b>", reason="truncated", step=60)
    started.train(60)
    started.trace()
    started.evaluate()
    started.finish()
    return started


def test_report_is_one_file_that_fetches_nothing(whole: SyntheticRun) -> None:
    path = write_report(whole.dir)
    assert path == whole.dir / "report.html"
    text = path.read_text()
    page = Page(text)
    assert page.sources
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)
    assert {"script", "link", "iframe"}.isdisjoint(page.tags)
    assert "@import" not in text
    assert not re.search(r"url\(", text)
    assert set(re.findall(r"https?://[^\"'\s<]+", text)) <= {"http://www.w3.org/2000/svg"}


def test_report_shows_figures_curves_pictures_schedule_layout_and_commands(whole: SyntheticRun) -> None:
    page = Page(write_report(whole.dir).read_text())
    says = page.says()
    assert "Compressed gradients" in says
    assert "powersgd 50 kB of 900 kB 18 x less" in says
    for part in (
        "finished", "120 of 120", "held-out loss", "1.40 ×", "Loss by step", "Tokens a second", "Images a second",
        "Time per phase for each rank", "as planned", "step 120, as measured", "Placement of ranks", "node 0",
        "set train.language.lr = 1e-4", "cannot be decoded: truncated", "What is this?", "[parallel]",
    ):  # fmt: skip
        assert part in says, part
    assert page.tags.count("img") == 8
    assert all(f"truth {name}" in says for name in NAMES)
    assert page.tags.count("polyline") >= 4


def test_names_from_data_are_escaped(whole: SyntheticRun) -> None:
    text = write_report(whole.dir).read_text()
    assert "shard-1/<b>" not in text
    assert "shard-1/&lt;b&gt;7&lt;/b&gt;" in text


def test_a_run_that_failed_at_once_has_a_report_too(started: SyntheticRun) -> None:
    started.finish("failed", "rank 2 (stage 0 tp 0) failed in start of step 0: no shards")
    says = Page(write_report(started.dir).read_text()).says()
    assert "no shards" in says
    assert "None was given" in says


def test_a_picture_that_is_gone_is_said(whole: SyntheticRun) -> None:
    for path in (whole.dir / "samples").rglob("3.png"):
        path.unlink()
    page = Page(write_report(whole.dir).read_text())
    assert page.tags.count("img") == 7
    assert "no picture" in page.says()


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MmlabError, match=r"run\.json"):
        write_report(tmp_path)


def test_long_runs_make_small_reports(started: SyntheticRun) -> None:
    log = EventLog(started.paths.events, "a")
    for step in range(1, 20_001):
        log.emit("step", step=step, loss=5 / step, tokens_per_s=100.0, images_per_s=3.0, seconds=0.1)
    log.close()
    assert write_report(started.dir).stat().st_size < 800_000
