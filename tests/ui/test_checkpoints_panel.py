"""The checkpoint browser: what pages get, what its buttons do, and that a slow location holds nothing up."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mmlab.errors import CheckpointError
from mmlab.lab import Run
from mmlab.tracking.tree import CheckpointTree
from mmlab.ui.dashboard import part
from mmlab.ui.panels.checkpoints import MOST, Checkpoints
from mmlab.ui.source import RunSource
from ui.stage import Stage, browser_page
from ui.synthetic import SyntheticRun, branch_out


@pytest.fixture
def grown(started: SyntheticRun, monkeypatch: pytest.MonkeyPatch) -> SyntheticRun:
    """Three lineages with checkpoints, live."""
    monkeypatch.setenv("MMLAB_RUNS", str(started.dir.parent))
    branch_out(started, last=4)
    return started


@pytest.fixture
def panel(grown: SyntheticRun) -> Iterator[Checkpoints]:
    made = Checkpoints(RunSource(Run(grown.dir), grown.dir))
    yield made
    made.close()


def frame(panel: Checkpoints) -> dict[str, Any]:
    """What pages get once the listing is in."""
    end = time.monotonic() + 10
    panel.source.look()
    panel.frame()
    assert panel._listing.looked.wait(10)
    while panel._listing._under_way:
        assert time.monotonic() < end
        time.sleep(0.005)
    return panel.frame()


def test_a_page_gets_the_tree(panel: Checkpoints) -> None:
    found = frame(panel)
    rows = [node for node in found["nodes"] if node["kind"] == "checkpoint"]
    assert [row["name"] for row in rows] == ["step-000010-a", "step-000020-a", "step-000030-a", "best"]
    assert (rows[-1]["periodic"], rows[-1]["samples"], rows[-1]["current"]) == (False, 480, True)
    assert (found["listed"], found["unreadable"], found["state"]) == (True, "", "running")
    assert len(json.dumps(found)) < 4000
    assert "lineage c: restored best" in panel.text()
    assert "<table" in panel.html()


def test_a_new_one_is_shown_at_once(panel: Checkpoints, grown: SyntheticRun) -> None:
    frame(panel)
    panel._listing._next = float("inf")
    grown.checkpoint()
    time.sleep(0.11)  # a look at the folder is good for a tenth of a second
    assert any(node.get("name") == "step-000034-c" for node in frame(panel)["nodes"])


def test_a_location_that_does_not_answer_holds_nothing_up(
    panel: Checkpoints, grown: SyntheticRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = threading.Event()

    def slow(_: Any) -> list[Any]:
        answers.wait(10)
        raise CheckpointError("s3://far cannot be reached")

    monkeypatch.setattr(Run, "checkpoints", slow)
    panel.source.look()
    assert not panel.frame()["listed"]
    assert panel._listing._under_way
    answers.set()
    assert frame(panel)["unreadable"] == "s3://far cannot be reached"
    assert panel.html() == "<p>s3://far cannot be reached</p>"


def test_thousands_of_rows_are_bounded(panel: Checkpoints) -> None:
    frame(panel)
    panel._listing.tree = CheckpointTree(panel._listing.tree.nodes * 200)
    panel._listing._next = float("inf")
    found = panel.frame()
    assert (len(found["nodes"]), found["left_out"]) == (MOST, 7 * 200 - MOST)


def test_buttons_do_what_the_verbs_do(panel: Checkpoints, grown: SyntheticRun) -> None:
    details = panel.handle("details", {"name": "best"})
    assert (details["samples"], details["epochs"], details["problem"]) == (480, [0], "")
    json.dumps(details)
    checked = panel.handle("check", {"name": "best", "changes": "parallel.tp=1"})
    assert checked == {
        what: {"ok": True, "text": "4 ranks: vision_dp 2, pp 2; 120 steps in all"} for what in ("restore", "branch")
    }
    checked = panel.handle("check", {"name": "best", "changes": "train.steps=20 parallel.tp=1"})
    assert (checked["restore"]["ok"], checked["branch"]["ok"]) == (True, False)
    assert "nothing is left to train" in checked["branch"]["text"]
    assert "key=value" in panel.handle("check", {"name": "best", "changes": "=3"})["restore"]["text"]
    sent = panel.handle("restore", {"name": "best", "changes": "parallel.tp=1"})
    assert "sent" in sent["text"]
    assert grown.answer() == ["restore"]
    time.sleep(0.11)
    assert [sent["id"], True] in [answer[:2] for answer in frame(panel)["answers"]]
    assert panel.handle("rename", {"name": "step-000010-a", "new": "ten"})["name"] == "ten"
    with pytest.raises(CheckpointError, match="would recover"):
        panel.handle("delete", {"name": "best"})
    assert "deleted best" in panel.handle("delete", {"name": "best", "force": True})["text"]
    assert next(node["name"] for node in frame(panel)["nodes"] if node["kind"] == "checkpoint") == "ten"
    with pytest.raises(ValueError, match="unknown request"):
        panel.handle("explode", {"name": "ten"})


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_in_a_browser(grown: SyntheticRun, tmp_path: Path) -> None:
    with browser_page(1200, 900) as page:
        shown = part(RunSource(Run(grown.dir), grown.dir), "checkpoint_view")
        stage = Stage(page, shown)
        box = page.get_by_role("checkbox", name="best")
        stage.until(lambda: box.count() == 1)
        assert page.get_by_role("button", name="Compare").is_disabled()
        box.focus()
        page.keyboard.press("Space")
        stage.until(lambda: "480 samples, epoch 1" in page.locator(".mm-ck-what").inner_text())
        page.keyboard.press("ArrowUp")
        assert page.evaluate("document.activeElement.value") == "step-000030-a"
        page.get_by_label("with changes to the plan").fill("parallel.tp=1")
        stage.until(lambda: "✓ Restore: 4 ranks" in page.locator(".mm-ck-check").inner_text())
        page.get_by_label("with changes to the plan").fill("data.lanes=3")
        stage.until(lambda: "✕ Branch" in page.locator(".mm-ck-check").inner_text())
        stage.shot(tmp_path / "checkpoints-details.png")
        page.get_by_label("with changes to the plan").fill("")
        page.get_by_role("button", name="Restore").click()
        assert list(grown.paths.control.glob("*.json")) == []  # only with the second click
        page.get_by_role("button", name="Really restore").click()
        stage.until(lambda: grown.answer() == ["restore"])
        stage.until(
            lambda: "restore best: applied after step 34 on 6 ranks" in page.locator(".mm-ck-said").inner_text()
        )
        page.get_by_label("New name").fill("a/b")
        page.get_by_role("button", name="Name", exact=True).click()
        stage.until(lambda: "is not a name for a checkpoint" in page.locator(".mm-ck-said").inner_text())
        page.get_by_role("button", name="Delete", exact=True).click()
        page.get_by_role("button", name="Really delete").click()
        stage.until(lambda: page.get_by_role("button", name="Delete all the same").is_visible())
        page.get_by_role("checkbox", name="step-000010-a").check()
        stage.until(lambda: page.get_by_role("button", name="Compare").is_enabled())
        page.get_by_role("button", name="Compare").click()
        stage.until(lambda: page.locator(".mm-ck-what .mm-bad").count() == 1, 60)  # its files hold no weights
        grown.train(3)
        grown.checkpoint("newer")
        stage.until(lambda: page.get_by_role("checkbox", name="newer").count() == 1)
        assert page.get_by_role("checkbox", name="best").is_checked()
        assert [e for e in stage.errors if "favicon" not in e] == []
        shown.close()
