"""The schedule as pages get it: lanes, bubbles, traced steps; and in a browser: hover, keyboard, playing."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from mmlab.errors import MmlabError
from mmlab.plan import Plan
from mmlab.plan.ops import Kind
from mmlab.ui.dashboard import part
from mmlab.ui.lanes import KINDS, kinds
from mmlab.ui.panels.schedule import PlannedPanel, SchedulePanel
from mmlab.ui.plans import schedule_view
from mmlab.ui.source import RunSource
from ui.stage import Stage, browser_page
from ui.synthetic import InboxRun, SyntheticRun

TOLD = """() => {
  const clock = document.querySelector(".mm-lane-clock");
  window.told = new Set();
  new MutationObserver(() => window.told.add(clock.textContent)).observe(clock, { childList: true });
}"""
"""Keeps the times that the player shows in `told`."""


@pytest.fixture
def run(started: SyntheticRun) -> SyntheticRun:
    started.train(12)
    return started


def panel_of(run: SyntheticRun) -> SchedulePanel:
    panel = SchedulePanel(RunSource(InboxRun(run.dir), run.dir))
    panel.source.look()
    return panel


def test_every_kind_of_op_can_be_shown() -> None:
    assert sorted(KINDS) == sorted(get_args(Kind))
    assert len({(letter, name) for _, name, _, letter, shape in kinds() if shape == "compute"}) > 5


def test_a_frame_has_the_plan_and_the_newest_traced_step(run: SyntheticRun) -> None:
    panel = panel_of(run)
    frame = panel.frame()
    assert (frame["steps"], frame["measured"]) == ([], None)
    assert "no step was traced yet" in panel.text()
    run.trace()
    run.train(10)
    run.trace()
    frame = panel.frame()
    assert (frame["steps"], frame["measured"]["step"]) == ([12, 22], 22)
    assert [row[1] for row in frame["rows"]][:3] == ["vision 0", "vision 1", "stage 0 tp 0"]
    assert frame["ideal"]["share"] == pytest.approx(1 / 3)
    ops, timeline = frame["planned"]["ops"], run.plan.schedule().simulate()
    assert [[KINDS[op[0]] for op in line] for line in ops] == [[t.op.kind for t in line] for line in timeline]
    assert frame["measured"]["bubble"] == panel.feed.record.measured().bubble()
    assert panel.frame()["measured"] is frame["measured"], "read once"
    run.trace(slow=5)
    again = panel.frame()
    assert again["measured"]["step"] == 22
    assert again["measured"]["bubble"] > frame["measured"]["bubble"], "traced anew, after a restore"
    assert panel.handle("step", {"step": 12})["step"] == 12
    with pytest.raises(MmlabError, match="steps 12, 22"):
        panel.handle("step", {"step": 5})
    with pytest.raises(ValueError, match="unknown request"):
        panel.handle("fly", {})


def test_estimate_and_measurement_have_the_same_compute_on_the_common_axis(run: SyntheticRun) -> None:
    run.trace()
    frame = panel_of(run).frame()
    computes = {index for index, kind in enumerate(kinds()) if kind[4] == "compute" and kind[0] != "update"}
    totals = [sum(op[4] - op[3] for line in lanes["ops"] for op in line if op[0] in computes)
              for lanes in (frame["planned"], frame["measured"])]  # fmt: skip
    assert totals[0] * frame["measured"]["scale"] == pytest.approx(totals[1], rel=1e-3)


def test_a_slow_rank_shows_in_the_others_shares(run: SyntheticRun) -> None:
    run.trace()
    even = panel_of(run).frame()["measured"]["idle"]
    run.train(10)
    run.trace(slow=5)
    slow = panel_of(run).frame()["measured"]["idle"]
    assert slow[2] > even[2] + 0.05
    assert slow[5] < even[5] + 0.05


def test_fallbacks_show_both_pictures_and_the_bubbles(run: SyntheticRun) -> None:
    run.trace()
    panel = panel_of(run)
    assert panel.html().count("<svg") == 2
    assert "as measured at step 12" in panel.html()
    text = panel.text()
    assert "33.3% = (p - 1) / (m + p - 1)" in text
    assert text.count("F forward, B backward") == 2


def test_many_ranks_show_one_of_each_kind_and_messages_stay_small() -> None:
    plan = Plan.preset("quickstart").with_("parallel.dp=4", "parallel.pp=4", "parallel.tp=4", "data.global_batch=64")
    frame = PlannedPanel(plan).frame()
    assert (frame["ranks"], len(frame["rows"])) == (66, 6)
    assert all(rank < frame["ranks"] for line in frame["after"] for some in line for rank, _ in some)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_in_a_browser_ops_are_told_and_the_step_plays(run: SyntheticRun, tmp_path: Path) -> None:
    run.trace()
    run.train(10)
    run.trace()
    with browser_page(1200, 900) as page:
        stage = Stage(page, part(RunSource(InboxRun(run.dir), run.dir), "schedule_view"))
        detail, clock = page.locator(".mm-lane-detail"), page.locator(".mm-lane-clock")
        stage.until(lambda: page.locator(".mm-lane-plot svg").count() == 2)
        assert "As measured at step 22: bubble" in page.locator("#cell").inner_text()
        plot = page.locator(".mm-lane-plot").first
        plot.focus()
        for key in ("ArrowDown", "ArrowDown", "Home", "ArrowRight", "ArrowRight", "ArrowRight"):
            page.keyboard.press(key)
        stage.until(lambda: detail.inner_text().startswith("rank 2 (stage 0 tp 0): recv tokens, microbatch 1"))
        assert "waits for ranks 0, 1: image tokens of microbatch 1" in detail.inner_text()
        box = plot.bounding_box()
        assert box is not None
        bar = page.locator(".mm-lane-plot defs .mm-lane-name", has_text="B1").last
        x = float(bar.get_attribute("x") or 0)
        second = page.locator(".mm-lane-plot").nth(1).bounding_box()
        assert second is not None
        page.mouse.move(second["x"] + x, second["y"] + float(bar.get_attribute("y") or 0) - 4)
        stage.until(lambda: "backward, microbatch 1" in detail.inner_text() and "planned" in detail.inner_text())
        page.get_by_label("Traced step").select_option("12")
        stage.until(lambda: "As measured at step 12" in page.locator("#cell").inner_text())
        page.get_by_role("button", name="Forward").click()
        stage.until(lambda: "ms" in clock.inner_text())
        first = clock.inner_text()
        moment = page.locator(".mm-lane-moment")
        assert "waits for rank 2: activations of microbatch 0" in moment.inner_text()
        page.get_by_role("button", name="Play").click()
        stage.until(lambda: clock.inner_text() != first)
        page.get_by_role("button", name="Halt").click()
        stage.shot(tmp_path / "schedule-playing.png")
        page.get_by_role("button", name="Show all").click()
        assert not moment.is_visible()
        assert stage.errors == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_plan_alone_plays_op_by_op_where_motion_is_to_be_reduced() -> None:
    with browser_page(600, 900) as page:
        page.emulate_media(reduced_motion="reduce")
        shown = schedule_view(Plan.preset("laptop"))
        stage = Stage(page, shown)
        stage.until(lambda: page.locator(".mm-lane-plot svg").count() == 1)
        page.get_by_label("Speed").select_option("4")
        page.evaluate(TOLD)  # in the page: who looks from here now and then may miss most of them
        page.get_by_role("button", name="Play").click()
        stage.until(lambda: page.evaluate("window.told.size") > 4)
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= 600
        shown.close()
        assert stage.errors == []
