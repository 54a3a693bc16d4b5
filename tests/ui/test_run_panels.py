"""Compression, samples and log of a run as panels: what they send, what they do when asked, and how a page shows it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mmlab.errors import PlanError
from mmlab.lab import Run
from mmlab.tracking.compression import CompressionTable, CompressionTrail
from mmlab.tracking.logs import MOST, LogTail, clean
from mmlab.ui.dashboard import part
from mmlab.ui.panels import log as logs
from mmlab.ui.panels.compression import Compression
from mmlab.ui.panels.log import Log
from mmlab.ui.panels.samples import Samples
from mmlab.ui.source import RunSource
from ui.stage import Stage, browser_page
from ui.synthetic import CODED, SyntheticRun

TOPK = CODED | {"compressor": "topk", "options": {"ratio": 0.01, "error_feedback": True}}


def looked(run: SyntheticRun) -> RunSource:
    source = RunSource(Run(run.dir), run.dir)
    source.look()
    return source


# -- compression


def test_the_trail_tells_what_the_whole_history_tells(started: SyntheticRun) -> None:
    started.train(3)
    started.error = 0.3
    started.train(30)
    started.coded = TOPK
    started.train(25)
    started.error = 0.02
    started.train(40)
    source = looked(started)
    trail, record = source.feed.compression, Run(started.dir)
    assert trail.table().rows == record.compression().rows
    (row,) = trail.table().rows
    assert (row.compressor, row.error, row.error_step) == ("topk", 0.02, 59)
    assert list(trail.errors["vision"]) == [(4, 0.3), (59, 0.02)]
    assert list(trail.changes["vision"]) == [(1, "powersgd"), (34, "topk")]


def test_the_trail_forgets_what_the_run_went_back_from() -> None:
    trail = CompressionTrail()
    trail.take({"kind": "step", "step": 1, "compression": {"vision": CODED}})
    trail.take({"kind": "step", "step": 2, "compression": {"vision": TOPK | {"error": 0.1}}})
    trail.take({"kind": "lineage", "parent": "a", "parent_step": 1})
    assert [row.compressor for row in trail.table().rows] == ["powersgd"]
    assert not trail.errors["vision"]
    trail.take({"kind": "step", "step": 2, "compression": {"vision": CODED}})
    assert list(trail.changes["vision"]) == [(1, "powersgd")]
    trail.take({"kind": "relayout"})
    assert trail.table().rows == CompressionTable([]).rows


def test_compression_is_chosen_with_the_plans_bounds(started: SyntheticRun) -> None:
    started.train(2)
    panel = Compression(looked(started))
    frame = panel.frame()
    json.dumps(frame)
    assert dict(frame["compressors"])["topk"] == ["ratio", "error_feedback"]
    assert frame["fields"]["ratio"]["expects"] == "a number, above 0, at most 1"
    assert frame["chosen"]["vision"]["compressor"] == "none"
    options = {"ratio": "0.05", "error_feedback": False, "residual": "drop", "warmup_steps": "0"}
    sent = panel.handle("compress", {"group": "vision", "compressor": "topk", "options": options})
    panel.source.feed.read()
    assert panel.frame()["controls"]["compress vision"]["id"] == sent["id"]
    started.answer()
    panel.source.feed.read()
    frame = panel.frame()
    assert (frame["chosen"]["vision"]["compressor"], frame["chosen"]["vision"]["ratio"]) == ("topk", 0.05)
    assert frame["controls"]["compress vision"]["ok"]
    for bad, message in (({"ratio": "much"}, "ratio = 'much': it takes a number"), ({"ratio": "2"}, "at most 1")):
        with pytest.raises((ValueError, PlanError), match=message):
            panel.handle("compress", {"group": "vision", "compressor": "topk", "options": bad})
    assert panel.handle("measure", {})["id"] > sent["id"]
    assert "powersgd" in panel.text()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_page_chooses_a_compressor(started: SyntheticRun, tmp_path: Path) -> None:
    started.train(20)
    started.error = 0.031
    started.train(20)
    with browser_page(1200, 900) as page:
        stage = Stage(page, part(RunSource(Run(started.dir), started.dir), "compression_view"))
        stage.until(
            lambda: "50 kB sent of 900 kB dense, 18 times fewer" in page.locator(".mm-compression").inner_text()
        )
        assert page.locator(".mm-small-chart circle").count() == 1
        height = page.locator(".mm-board").bounding_box()["height"]  # type: ignore[index]
        page.get_by_label("Compressor of vision").select_option("topk")
        ratio = page.locator(".mm-group").first.get_by_label("ratio")
        ratio.fill("7")
        page.get_by_label("Apply to the gradients of vision").click()
        told = page.locator('[data-control="compress vision"]')
        stage.until(lambda: "refused" in told.inner_text() and "at most 1" in told.inner_text())
        ratio.fill("0.02")
        page.get_by_label("Apply to the gradients of vision").click()
        stage.until(lambda: "waiting for the end of step 41" in told.inner_text())
        assert started.answer() == ["set"]
        stage.until(lambda: "on 6 of 6 ranks" in told.inner_text())
        assert page.locator(".mm-board").bounding_box()["height"] == height  # type: ignore[index]
        page.get_by_role("button", name="Measure").click()
        stage.until(lambda: started.answer() == ["measure"])
        stage.until(lambda: "measure: applied after step 40" in page.locator('[data-control="measure"]').inner_text())
        stage.shot(tmp_path / "compression.png")
        assert stage.errors == []


# -- samples


def test_pictures_are_sent_again_only_when_they_are_others(started: SyntheticRun) -> None:
    started.train(10)
    panel = Samples(looked(started))
    assert panel.frame()["items"] == []
    assert panel.text() == "no samples yet"
    started.evaluate()
    panel.source.feed.read()
    first = panel.frame()
    json.dumps(first)
    assert len(first["items"]) == len(first["pictures"]) == 8
    assert sum(len(url) for url in first["pictures"].values()) < 8 * 17_000
    assert [item["right"] for item in first["items"]] == [False, True, True, False, True, True, False, True]
    started.train(10)
    started.evaluate()
    panel.source.feed.read()
    second = panel.frame()
    assert second["pictures"] == first["pictures"]
    assert [step for _, step, _ in second["steps"]] == [10, 20]
    assert panel.handle("step", {"folder": first["folder"]})["items"] == first["items"]
    assert "5 of 8 right" in panel.text()
    assert panel.html().count("<img") == 8


def test_samples_without_their_files_show_their_texts(started: SyntheticRun) -> None:
    started.evaluate()
    started.events.emit(
        "samples", step=3, folder="/elsewhere/step-3",
        items=[{"image": "../../plan.toml", "prompt": "这是什么？", "truth": "红苹果" * 900, "text": "<b>红苹果</b>"}],
    )  # fmt: skip
    shutil.rmtree(started.paths.samples)
    panel = Samples(looked(started))
    (item,) = panel.frame()["items"]
    assert item["picture"] is None
    assert len(item["truth"]) == 400
    assert "&lt;b&gt;" in panel.html()
    with pytest.raises(ValueError, match="no samples 'other'"):
        panel.handle("step", {"folder": "other"})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_page_shows_samples_and_earlier_ones(started: SyntheticRun, tmp_path: Path) -> None:
    started.train(10)
    started.evaluate()
    with browser_page(600, 900) as page:
        stage = Stage(page, part(RunSource(Run(started.dir), started.dir), "samples_view"), dark=True)
        stage.until(lambda: page.locator(".mm-card").count() == 8)
        assert page.get_by_alt_text("picture of: red apple").evaluate("(image) => image.naturalWidth") == 72
        started.train(10)
        started.evaluate(pictures=2)
        stage.until(lambda: page.locator(".mm-card").count() == 2)
        page.get_by_role("button", name="Earlier").click()
        stage.until(lambda: page.locator(".mm-card").count() == 8)
        assert page.get_by_label("Step of the samples").input_value() == "step-000010"
        stage.shot(tmp_path / "samples.png")
        assert stage.errors == []


# -- log


def test_a_tail_follows_a_log_through_its_rotation(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    tail = LogTail(path)
    assert tail.read() == []
    path.write_bytes(b"one\ntw")
    assert tail.read() == ["one"]
    with path.open("ab") as file:
        file.write(b"o\nthree\n")
    path.rename(tmp_path / "rank-0.log.1")
    path.write_bytes(b"four\n")
    assert tail.read() == ["two", "three", "four"]
    assert tail.read() == []


def test_a_tail_reads_little_of_much(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    path.write_bytes(b"x" * 50 + b"\n" + b"".join(b"line %06d\n" % number for number in range(20_000)))
    first, *lines = LogTail(path).read()
    assert first == f"... {51 + 20_000 * 12 - MOST} bytes left out ..."
    assert lines[-1] == "line 019999"
    assert len(lines) == MOST // 12
    assert clean("10 %\r50 %\r100 %\n") == "100 %"
    assert clean("\ufffd" * 5000).endswith("(3000 more characters)")


def test_the_log_keeps_little_whatever_ranks_print(started: SyntheticRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "KEPT_LINES", 10)
    panel = Log(looked(started))
    assert panel.text() == "no rank has printed anything yet"
    for rank in (0, 3):
        started.paths.log(rank).write_text("".join(f"{number}\n" for number in range(8)))
    frame = panel.frame()
    assert (frame["first"], len(frame["lines"])) == (6, 10)
    assert frame["lines"][-1] == [3, "7"]
    assert panel.handle("read", {"rank": 0, "lines": 3}) == {"lines": ["5", "6", "7"]}
    monkeypatch.setattr(logs, "MOST_CHARS", 2)
    assert panel.handle("read", {"rank": 0, "lines": 3}) == {"lines": ["6", "7"]}
    with pytest.raises(ValueError, match="there is no rank 6; the run has 6"):
        panel.handle("read", {"rank": 6})
    assert panel.text().endswith("[3] 7")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_page_follows_filters_and_stands_still(started: SyntheticRun, tmp_path: Path) -> None:
    def write(rank: int, lines: list[str]) -> None:
        with started.paths.log(rank).open("a") as file:
            file.writelines(f"{line}\n" for line in lines)

    for rank in range(2):
        write(rank, [f"rank {rank} line {number}" for number in range(60)])
    with browser_page(1200, 700) as page:
        stage = Stage(page, part(RunSource(Run(started.dir), started.dir), "log_view"))
        lines = page.locator(".mm-log-line")

        def at_end() -> Any:
            return page.locator(".mm-lines").evaluate("(l) => l.scrollHeight - l.scrollTop - l.clientHeight < 5")

        stage.until(lambda: lines.count() == 120)
        assert at_end()
        write(0, ["\x1b[31mred\x1b[0m 汉字"])
        stage.until(lambda: lines.count() == 121)
        assert at_end()
        assert lines.last.inner_text() == "[0] red 汉字"
        assert lines.last.locator("span").inner_text() == "red"
        page.locator(".mm-lines").evaluate("(list) => { list.scrollTop = 100; }")
        stage.until(lambda: "not following" in page.locator(".mm-log-said").inner_text())
        write(1, ["later"])
        stage.until(lambda: lines.count() == 122)
        assert page.locator(".mm-lines").evaluate("(list) => list.scrollTop") == 100
        page.get_by_label("Rank", exact=True).select_option("1")
        stage.until(lambda: lines.count() == 61)
        page.get_by_label("Show only lines with this text").fill("LATER")
        assert lines.count() == 1
        stage.until(page.get_by_label("follow").is_checked)  # by itself: the end is in sight again
        write(1, ["later still"])
        stage.until(lambda: lines.count() == 2)
        stage.shot(tmp_path / "log.png")
        sizes = [len(json.dumps(content)) for content, _ in stage.sent if content["kind"] == "tick"]
        assert max(sizes) < 1_000
        assert stage.errors == []
