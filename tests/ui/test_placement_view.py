"""The placement as pages get it, and in a browser: a few ranks, many ranks, one that is dead, what the doctor says."""

from __future__ import annotations

from pathlib import Path

import pytest

from mmlab.plan import Plan
from mmlab.ui.dashboard import part
from mmlab.ui.panels.placement import PlacementPanel
from mmlab.ui.source import RunSource
from ui.stage import Stage, browser_page
from ui.synthetic import InboxRun, SyntheticRun

MANY = ("parallel.vision=first_stage", "parallel.vision_dp=0", "parallel.dp=4", "parallel.pp=4", "parallel.tp=4",
        "data.global_batch=64", "cluster.ranks_per_node=8")  # fmt: skip


@pytest.fixture
def run(started: SyntheticRun) -> SyntheticRun:
    started.train(6)
    return started


def panel_of(run: SyntheticRun) -> PlacementPanel:
    panel = PlacementPanel(RunSource(InboxRun(run.dir), run.dir))
    panel.source.look()
    return panel


def test_a_frame_says_what_the_record_says(run: SyntheticRun) -> None:
    panel = panel_of(run)
    frame, record = panel.frame(), panel.feed.record
    assert frame["hosts"] == [["here", [0, 1, 2, 3, 4, 5]]]
    assert [now[0] for now in frame["now"]] == [rank.state for rank in record.placement().ranks]
    assert [link[0] for link in frame["links"]] == [row.axis for row in record.traffic().rows]
    assert [sum(link[3]) for link in frame["links"]] == pytest.approx(
        [sum(row.bytes) for row in record.traffic().rows], rel=1e-2
    )
    assert frame["slowest"] == record.bottleneck().sentence
    assert panel.handle("doctor", {})["lines"][1] == "no rank waits for another one just now"
    with pytest.raises(ValueError, match="unknown request"):
        panel.handle("fly", {})
    assert panel.html().startswith("<div><svg")


def test_a_frame_of_a_run_that_has_not_started(tmp_path: Path) -> None:
    frame = panel_of(SyntheticRun(tmp_path)).frame()
    assert (frame["state"], frame["links"], frame["slowest"]) == ("queued", [], "")
    assert {now[0] for now in frame["now"]} == {"absent"}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_in_a_browser_a_dead_rank_stands_out_and_the_doctor_answers(run: SyntheticRun, tmp_path: Path) -> None:
    run.stall(-600, dict.fromkeys(range(6), "forward"))  # else they wait once the browser has taken 5 s to start
    with browser_page(1200, 900) as page:
        stage = Stage(page, part(RunSource(InboxRun(run.dir), run.dir), "placement_view"))
        alarm, detail = page.locator(".mm-ranks-alarm"), page.locator(".mm-ranks-detail")
        stage.until(lambda: alarm.inner_text() == "All 6 ranks are alive.")
        page.locator(".mm-ranks-plot").focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        stage.until(lambda: detail.inner_text().startswith("rank 2 (stage 0 tp 0): alive"))
        assert "tp 2.8 MB {2, 3}" in detail.inner_text()
        page.get_by_role("button", name="What holds it up?").click()
        stage.until(lambda: "no rank waits" in page.locator(".mm-ranks-findings").inner_text())
        run.lose(4)
        stage.until(lambda: "rank 4 (stage 1 tp 0): dead" in alarm.inner_text())
        assert page.locator("g.mm-ranks-dead .mm-ranks-state").text_content() == "✕ dead"
        page.get_by_text("Ranks as a table").click()
        stage.until(lambda: "✕ dead" in page.locator(".mm-ranks-table").first.inner_text())
        stage.shot(tmp_path / "placement-dead.png")
        assert stage.errors == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_64_ranks_on_8_hosts_fit_into_600_pixels(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path, Plan.preset("quickstart").with_(*MANY))
    run.start()
    run.train(3)
    with browser_page(600, 900) as page:
        stage = Stage(page, part(RunSource(InboxRun(run.dir), run.dir), "placement_view"), dark=True)
        stage.until(lambda: page.locator(".mm-ranks-card").count() == 64)
        assert page.locator(".mm-ranks-host").count() == 8
        page.get_by_role("button", name="language 16").click()
        stage.until(lambda: page.locator(".mm-ranks-link").count() == 16)
        page.locator(".mm-ranks-plot").focus()
        page.keyboard.press("End")
        stage.until(lambda: "rank 63" in page.locator(".mm-ranks-detail").inner_text())
        box = page.locator(".mm-ranks-plot svg").bounding_box()
        assert box is not None
        assert box["width"] < 600
        assert page.evaluate("document.documentElement.scrollWidth") <= 600
        stage.shot(tmp_path / "placement-64.png")
        assert stage.errors == []
    run.close()
