"""Charts: which curves they draw, what a step sends, zoom from the log, runs side by side, marks."""

from __future__ import annotations

from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from mmlab.errors import MmlabError
from mmlab.lab import Run
from mmlab.ui import feed as feeds
from mmlab.ui.dashboard import part
from mmlab.ui.panel import Reply
from mmlab.ui.panels.charts import CHARTS, MOST_OTHERS, Charts
from mmlab.ui.source import RunSource
from ui.synthetic import InboxRun, SyntheticRun


def charts_of(run: SyntheticRun) -> Charts:
    source = RunSource(InboxRun(run.dir), run.dir)
    charts = Charts(source)
    source.look()
    return charts


def look(charts: Charts) -> Any:
    charts.source._looked = float("-inf")
    charts.source.look()
    return charts.points()


def decode(reply: Reply) -> dict[str, tuple[list[float], list[float]]]:
    found = {}
    for index, (name, count) in enumerate(reply.value["curves"]):
        x, y = array("d", reply.buffers[2 * index]), array("f", reply.buffers[2 * index + 1])
        assert len(x) == len(y) == count
        found[name] = (list(x), list(y))
    return found


def test_charts_draw_every_curve_of_a_step(started: SyntheticRun) -> None:
    started.train(3)
    started.evaluate()
    charts = charts_of(started)
    assert set(charts.curves()) == {"loss", "held_out", "tokens_per_s", "images_per_s"}
    charts.set(shown=list(CHARTS))
    curves = charts.curves()
    modules = ("vision", "projector", "language")
    assert {f"{kind}.{module}" for kind in ("grad_norm", "lr") for module in modules} <= set(curves)
    assert {"grad_norm_total", "data_wait", "phase.encode", "phase.backward", "phase.pipeline"} <= set(curves)
    assert "phase.control" not in curves
    assert all(len(series) == (1 if name == "held_out" else 3) for name, series in curves.items())


def test_phases_are_means_over_ranks_in_milliseconds(started: SyntheticRun) -> None:
    phases = [[0.0] * 13 for _ in range(6)]
    phases[0][3], phases[1][3] = 0.3, 0.6
    started.events.emit("step", step=1, loss=1.0, phases=phases)
    charts = charts_of(started)
    charts.set(shown=["phases"])
    ((name, series),) = charts.curves().items()
    assert name == "phase.forward"
    assert series.last == (1, pytest.approx(150.0))


def test_only_charts_in_sight_get_points(started: SyntheticRun) -> None:
    charts = charts_of(started)
    charts.curves()
    started.train(2)
    assert {name: len(points) for name, points in look(charts).items()} == {
        "loss": 2, "tokens_per_s": 2, "images_per_s": 2,
    }  # fmt: skip
    charts.set(shown=["rates"])
    assert look(charts) is None
    assert set(charts.curves()) == {"lr.vision", "lr.projector", "lr.language"}
    started.train(1)
    assert [points for points in look(charts).values()] == [[(3.0, pytest.approx(0.997e-3))]] * 3
    assert look(charts) == {}


def test_a_flood_and_a_restore_make_pages_take_all_anew(started: SyntheticRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mmlab.ui.panels.charts.CAPACITY", 5)
    charts = charts_of(started)
    charts.curves()
    started.train(6)
    assert look(charts) is None
    charts.curves()
    started.events.emit("lineage", id="b", parent="a", parent_step=2, step=2)
    assert look(charts) is None
    assert len(charts.curves()["loss"]) == 2


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ({"shown": ["loss", "losses"]}, "no chart losses; there are loss, throughput"),
        ({"smoothing": 70}, "from 0 to 50 percent"),
        ({"smoothing": float("nan")}, "from 0 to 50 percent"),
    ],
)
def test_choices_that_make_no_sense_are_refused(started: SyntheticRun, choice: dict[str, Any], said: str) -> None:
    charts = charts_of(started)
    with pytest.raises(ValueError, match=said):
        charts.handle("set", choice)
    assert charts.frame()["shown"] == ["loss", "throughput"]
    with pytest.raises(ValueError, match="no range"):
        charts.handle("range", {"low": 5, "high": 2})


def test_a_zoom_is_read_from_the_log_without_the_rest(started: SyntheticRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "PIECE", 20_000)
    monkeypatch.setattr(feeds, "READ_LIMIT", 20_000)
    source = RunSource(InboxRun(started.dir), started.dir)
    source.feed._capacity = 100
    source.feed.curves = {}
    charts = Charts(source)
    started.train(300)
    source.look()
    assert not source.feed.curves["loss"].whole
    before = source.feed.curves["loss"].between(120, 160)
    read: list[int] = []
    monkeypatch.setattr(feeds, "read_events", lambda path, start, size: read.append(size) or real(path, start, size))
    x, y = decode(charts.handle("range", {"low": 120, "high": 160}))["loss"]
    assert x == list(range(120, 161))
    assert len(before) < len(x)
    assert sum(read) < started.paths.events.stat().st_size / 3
    everything = {event["step"]: event["loss"] for event in Run(started.dir).metrics()}
    assert y == pytest.approx([everything[step] for step in range(120, 161)])


real = feeds.read_events


def test_a_zoom_copies_nothing_while_points_are_added(started: SyntheticRun) -> None:
    started.train(20)
    panel = Charts(source := RunSource(InboxRun(started.dir), started.dir))
    source.look()
    with ThreadPoolExecutor(1) as pool:
        with source.lock:
            reply = pool.submit(panel.closer, 5, 8)
            with pytest.raises(TimeoutError):
                reply.result(0.2)
        assert dict(reply.result(10).value["curves"])["loss"] == 4


def test_a_zoom_shows_the_current_lineage_only(started: SyntheticRun) -> None:
    source = RunSource(InboxRun(started.dir), started.dir)
    source.feed._capacity = 20
    source.feed.curves = {}
    charts = Charts(source)
    started.train(60)
    started.events.emit("lineage", id="b", parent="a", parent_step=30, step=30)
    started.events.lineage = "b"
    started.step = 30
    started.train(20)
    source.look()
    x, y = decode(charts.handle("range", {"low": 25, "high": 40}))["loss"]
    assert x == list(range(25, 41))
    everything = {event["step"]: event["loss"] for event in Run(started.dir).metrics()}
    assert y == pytest.approx([everything[step] for step in range(25, 41)])


def test_what_happened_is_marked(started: SyntheticRun) -> None:
    started.train(3)
    command = {"id": "1", "verb": "set", "args": {"values": {"train.language.lr": 5e-4}}, "ranks": [0], "message": ""}
    started.events.emit("command", **command, ok=True, step=3)
    started.events.emit("command", **command, ok=False, step=3)
    started.events.emit("checkpoint", name="step-000003", step=3, path="x", seconds=0.4, bytes=4e6)
    started.events.emit("recovery", done=False, reason="rank 3 lost", attempt=1, of=3, step=3)
    started.events.emit("recovery", done=True, seconds=4.0, step=4)
    started.events.emit("restore", name="step-000003", step=3, from_step=3, values={})
    started.finish("failed", "rank 1 failed")
    marks = charts_of(started).frame()["marks"]
    assert [(step, kind) for step, kind, _ in marks] == [
        (3, "command"), (3, "checkpoint"), (3, "failure"), (4, "recovery"), (3, "restore"), (3, "failure"),
    ]  # fmt: skip
    assert "set train.language.lr = 5e-4: applied after step 3" in marks[0][2]
    assert marks[-1][2].endswith("failed: rank 1 failed")


@pytest.fixture
def pair(tmp_path: Path, started: SyntheticRun) -> tuple[SyntheticRun, SyntheticRun]:
    """Two runs in one place: ten steps, and four so far."""
    other = SyntheticRun(tmp_path, name="other")
    other.start()
    other.train(4)
    started.train(10)
    return started, other


def test_other_runs_are_drawn_beside_and_followed(pair: tuple[SyntheticRun, SyntheticRun]) -> None:
    run, other = pair
    charts = charts_of(run)
    assert charts.handle("runs", {}) == [other.dir.name]
    charts.handle("overlay", {"runs": [other.dir.name]})
    assert charts.frame()["others"] == [["@1", other.dir.name]]
    assert look(charts) is None
    assert {name: len(series) for name, series in charts.curves().items() if "loss" in name} == {
        "loss": 10, "loss@1": 4,
    }  # fmt: skip
    other.train(2)
    charts._others[0].source._looked = float("-inf")
    assert {name: len(points) for name, points in look(charts).items() if "loss" in name} == {"loss@1": 2}
    assert decode(charts.handle("range", {"low": 5, "high": 9}))["loss@1"][0] == [5, 6]
    assert other.dir.name in charts.text()
    assert other.dir.name[-17:] in charts.html()
    with pytest.raises(ValueError, match=r"no run \.\./x beside"):
        charts.handle("overlay", {"runs": ["../x"]})
    charts.handle("overlay", {"runs": []})
    assert charts.frame()["others"] == []
    other.close()


def test_what_a_page_chooses_a_cell_can_too(pair: tuple[SyntheticRun, SyntheticRun]) -> None:
    run, other = pair
    charts = part(RunSource(InboxRun(run.dir), run.dir), "charts")
    shown = charts.show_only("norms", "loss").scale(smoothing=0, log=True).overlay(Run(other.dir))  # type: ignore[attr-defined]
    frame = shown.frames()["charts"]
    assert (frame["shown"], frame["smoothing"], frame["log"]) == (["loss", "norms"], 0, True)
    assert frame["others"][0][1] == other.dir.name
    assert "grad_norm.vision" in repr(charts)
    with pytest.raises(MmlabError):
        charts.overlay(run.dir / "nothing")  # type: ignore[attr-defined]
    with pytest.raises(MmlabError, match=f"at most {MOST_OTHERS} runs"):
        charts.panels["charts"].overlay([Path(f"/{index}") for index in range(5)])  # type: ignore[attr-defined]
    other.close()


def test_a_run_without_steps_has_charts_in_text_and_picture(started: SyntheticRun) -> None:
    charts = charts_of(started)
    assert charts.text().startswith("loss")
    assert "<svg" in charts.html()
    assert look(charts) == {}
