"""The dashboard: what cells hold, what goes to views and how often, commands and their answers."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import pytest

from mmlab.errors import MmlabError, PlanError, RunFailed
from mmlab.ui import feed as feeds
from mmlab.ui import part as dashboards
from mmlab.ui import source as sources
from mmlab.ui.dashboard import PARTS, Dashboard, part
from mmlab.ui.panels.controls import Controls
from mmlab.ui.panels.log import Log
from mmlab.ui.part import Part
from mmlab.ui.shell import Faces, install
from mmlab.ui.source import RunSource
from mmlab.ui.view import View
from ui.synthetic import InboxRun, SyntheticRun


class Screen:
    """What a front end would have got: messages of views, and the outputs of cells by display id."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.messages: list[dict[str, Any]] = []
        self.replies: dict[str, dict[str, Any]] = {}
        self.times: list[float] = []
        self.outputs: dict[str, dict[str, Any]] = {}
        self.published = 0
        self.signs = 0
        self.curves: dict[str, int] = {}
        self._names: list[str] = []
        monkeypatch.setattr(View, "send", lambda _, content, buffers=None: self.take(content, buffers))
        monkeypatch.setattr(dashboards, "publish", self.publish)

    def take(self, content: dict[str, Any], buffers: list[bytes]) -> None:
        if content["kind"] == "here":
            self.signs += 1
            return
        if content["kind"] == "reply":
            self.replies[content["token"]] = content
            return
        assert len(buffers) == 2 * len(content["curves"])
        if content["kind"] == "history":
            self._names, self.curves = [], {}
        for name, count in content["curves"]:
            if isinstance(name, str):
                self._names.append(name)
            known = name if isinstance(name, str) else self._names[name]
            self.curves[known] = self.curves.get(known, 0) + count
        self.messages.append(content)
        self.times.append(time.monotonic())

    def publish(self, data: dict[str, Any], _: Any, display_id: str = "", update: bool = False) -> None:
        assert update == (display_id in self.outputs)
        self.outputs[display_id] = data
        self.published += 1

    def frame(self, panel: str = "head") -> dict[str, Any]:
        """A panel's frame as a page that got all messages would have it."""
        frame: dict[str, Any] = {}
        for message in self.messages:
            new = message["frames"].get(panel, {})
            moved = message.get("moved", {}).get(panel, {})
            lists = {key: [*frame[key][gone:], *came] for key, (gone, came) in moved.items()}
            frame = new if message["kind"] == "history" else frame | new | lists
        return frame


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    return Screen(monkeypatch)


@pytest.fixture
def shown(started: SyntheticRun, screen: Screen) -> Iterator[Dashboard]:
    """A dashboard on the started run, shown in one cell; the first history is sent."""
    started.train(5)
    dashboard = Dashboard(InboxRun(started.dir), started.dir, period=0.02)
    dashboard.show()
    until(lambda: screen.messages)
    yield dashboard
    dashboard.close()


def say(dashboard: Dashboard, **message: Any) -> None:
    dashboard._heard(dashboard.view, message, [])


def until(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.005)


def test_a_cell_holds_board_picture_and_text(shown: Dashboard, screen: Screen) -> None:
    (output,) = screen.outputs.values()
    assert set(output) == {dashboards.OUTLIVES, "application/vnd.jupyter.widget-view+json", "image/png", "text/plain"}
    assert "running, step 5" in output["text/plain"]


def test_a_view_gets_history_then_increments(shown: Dashboard, screen: Screen, started: SyntheticRun) -> None:
    assert screen.messages[-1]["kind"] == "history"
    assert dict(screen.messages[-1]["curves"])["loss"] == 5
    started.train(3)
    until(lambda: screen.frame()["step"] == 8)
    assert {message["kind"] for message in screen.messages[1:]} == {"tick"}
    assert screen.curves["loss"] == screen.curves["images_per_s"] == 8
    frame = screen.frame()
    assert screen.frame("phases")["roles"][0] == "vision 0"
    assert [len(screen.frame("phases")[f"row {rank}"]) for rank in range(6)] == [
        len(screen.frame("phases")["names"])
    ] * 6
    assert frame["compression"] == "compressed gradients: vision powersgd, 18 times fewer bytes"
    assert frame["data"] == "4 ms, 2 ahead"
    assert screen.frame("controls")["rates"]["language"]["now"] == pytest.approx(1e-3 * (1 - 8 / 1000))


def test_a_reloaded_page_gets_the_history_again(shown: Dashboard, screen: Screen) -> None:
    before = len(screen.messages)
    say(shown, kind="hello")
    until(lambda: len(screen.messages) > before)
    assert screen.messages[before]["kind"] == "history"


def test_a_fault_in_a_panel_is_a_refusal(shown: Dashboard, screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(Controls, "handle", fail)
    say(shown, kind="ask", token="7", panel="controls", verb="pause")
    until(lambda: screen.replies)
    assert screen.replies["7"]["refusal"] == "RuntimeError: no such thing"


def test_a_fault_while_looking_is_told_and_the_view_goes_on(
    shown: Dashboard, screen: Screen, started: SyntheticRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("stale file handle")

    with monkeypatch.context() as broken:
        broken.setattr(RunSource, "look", fail)
        until(lambda: screen.frame().get("problem") == "OSError: stale file handle")
    started.train(2)
    until(lambda: screen.frame()["step"] == 7 and not screen.frame()["problem"])
    assert screen.curves["loss"] == 7


def test_what_stays_live_after_the_end_rests_while_nobody_looks(
    started: SyntheticRun, screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboards, "SEEN_FOR", 0.0)
    monkeypatch.setattr(dashboards, "UNSEEN_PERIOD", 600.0)
    frames: list[float] = []
    monkeypatch.setattr(Log, "every", 0.0)
    monkeypatch.setattr(Log, "_follow", lambda _: frames.append(time.monotonic()))
    started.train(3)
    live = Part(source := RunSource(InboxRun(started.dir), started.dir), [Log(source)], "a log", period=0.01)
    live.show()
    until(lambda: screen.messages)
    started.events.emit("state", state="stopped", reason="", step=3)
    until(lambda: screen.frame("log").get("state") == "stopped")  # told at once all the same
    until(lambda: len(screen.outputs) and screen.published >= 2)  # and so is the cell's picture
    until(lambda: live.view.still)  # and that of a page without a kernel, for which all is looked at once more
    made = len(frames)
    time.sleep(0.3)
    assert len(frames) == made
    live.close()


def test_messages_belong_to_the_cell_that_made_the_dashboard(
    started: SyntheticRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    parent: ContextVar[str] = ContextVar("parent")
    parent.set("the cell")
    seen: list[str] = []
    monkeypatch.setattr(View, "send", lambda *_, **__: seen.append(parent.get()))
    dashboard = Dashboard(InboxRun(started.dir), started.dir, period=0.02)
    assert dashboard.view
    until(lambda: seen)
    dashboard.close()
    assert seen[0] == "the cell"


def test_a_restore_sends_the_history(shown: Dashboard, screen: Screen, started: SyntheticRun) -> None:
    started.events.emit("lineage", id="b", parent="a", parent_step=2, step=2)
    until(lambda: screen.messages[-1]["kind"] == "history" and screen.frame()["step"] == 2)
    assert dict(screen.messages[-1]["curves"])["loss"] == 2


def test_a_long_log_fills_the_view_slice_by_slice(
    started: SyntheticRun, monkeypatch: pytest.MonkeyPatch, screen: Screen
) -> None:
    monkeypatch.setattr(sources, "LONG", 0)
    monkeypatch.setattr(sources, "SLICE", 0.0)
    monkeypatch.setattr(feeds, "READ_LIMIT", 20_000)
    monkeypatch.setattr(dashboards, "FILLING_PERIOD", 0.0)
    started.train(300)
    started.finish()
    live = part(RunSource(InboxRun(started.dir), started.dir), "charts")
    live._period = 0.0
    live.show()
    first = next(iter(screen.outputs.values()))
    end = time.monotonic() + 20
    while live.source.reading is not None or screen.frame("part")["reading"] is not None:
        assert time.monotonic() < end
        time.sleep(0.01)
    told = [message["frames"].get("part", {}).get("reading") for message in screen.messages]
    assert any(share in range(1, 100) for share in told), told
    assert screen.curves["loss"] == 300
    assert not live.over  # shown after the end, it stays live
    while next(iter(screen.outputs.values())) == first:  # a saved notebook shows all of it
        assert time.monotonic() < end
        time.sleep(0.01)
    live.close()
    assert "step 300" not in repr(first)


def test_a_flood_of_steps_is_coalesced(started: SyntheticRun, screen: Screen) -> None:
    dashboard = Dashboard(InboxRun(started.dir), started.dir, period=0.1)
    say(dashboard, kind="hello")
    end = time.monotonic() + 1.0
    while time.monotonic() < end:
        started.train(10)
        say(dashboard, kind="hello")
    until(lambda: screen.frame().get("step") == started.step)
    dashboard.close()
    span = screen.times[-1] - screen.times[0]
    assert len(screen.times) <= span / 0.1 + 2
    assert started.step > 3 * len(screen.messages)


def test_without_views_messages_become_rare(shown: Dashboard, screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown._pause() == 0.02
    monkeypatch.setattr(shown, "_seen", time.monotonic() - dashboards.SEEN_FOR - 1)
    assert shown._pause() == dashboards.UNSEEN_PERIOD
    signs = screen.signs
    say(shown, kind="here")
    assert shown._pause() == 0.02
    assert screen.signs == signs + 1


def test_pause_and_end_replace_what_the_cell_holds(shown: Dashboard, screen: Screen, started: SyntheticRun) -> None:
    (display_id,) = screen.outputs
    started.train(1)
    started.state("paused")
    until(lambda: screen.published == 2)
    assert "paused, step 6" in screen.outputs[display_id]["text/plain"]
    assert any("widget-view" in kind for kind in screen.outputs[display_id])
    started.state("running")
    started.train(2)
    started.finish()
    until(lambda: screen.published == 3)
    assert set(screen.outputs[display_id]) == {"image/png", "text/plain"}
    assert "finished, step 8" in screen.outputs[display_id]["text/plain"]
    until(lambda: shown.over)


def test_a_cell_that_can_take_it_gets_a_new_picture_now_and_then(
    shown: Dashboard, screen: Screen, started: SyntheticRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboards, "STILL_EVERY", 0.05)
    started.train(2)
    until(lambda: "step 7 of" in shown.view.still)
    assert screen.published == 1  # ipywidgets' renderer would draw the view anew, under someone's hands
    say(shown, kind="here", renewable=True)
    until(lambda: screen.published == 2)
    (output,) = screen.outputs.values()
    assert "running, step 7" in output["text/plain"]
    assert dashboards.OUTLIVES in output
    shown._kept_still = 0.0
    shown._renew()
    assert screen.published == 2  # nothing new: nothing to save


def test_a_run_that_was_deleted_is_told_and_its_last_picture_stays(
    started: SyntheticRun, screen: Screen, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mmlab.lab import Run

    monkeypatch.setattr(feeds, "GONE", 0.1)
    started.train(3)
    started.evaluate()
    started.trace()
    run, faces = Run(started.dir), Faces()
    faces.show(run)
    parts = [faces.part(run, name) for name in PARTS]
    for one in parts:
        one.show()
    until(lambda: len(screen.messages) > len(parts))
    started.close()
    shutil.rmtree(started.dir)
    until(lambda: "deleted" in next(iter(screen.outputs.values()))["text/plain"])
    until(lambda: all(one.over or one.lasting for one in parts))
    assert f"{started.dir} is gone" in repr(parts[1])
    for one in parts:
        assert [frame["problem"] for frame in one.frames().values() if "problem" in frame] == []
        assert one.still()[0]["text/plain"]
        one.close()
    faces.show(run)
    assert "image/png" in next(iter(screen.outputs.values()))
    with pytest.raises(MmlabError, match=r"pause: run .* has ended \(deleted\)"):
        run.pause()
    with pytest.raises(RunFailed, match="was deleted") as failed:
        run.wait(progress=False)
    assert failed.value.exit_code == 2


@pytest.mark.parametrize(
    ("verb", "args", "expected"),
    [
        ("pause", {}, {}),
        ("resume", {}, {}),
        ("stop", {}, {}),
        ("abort", {}, {"generation": 0}),
        ("checkpoint", {}, {}),
        ("step", {"n": 3}, {"n": 3}),
        ("set", {"key": "train.language.lr", "value": 1e-4}, {"values": {"train.language.lr": 1e-4}}),
    ],
)
def test_buttons_send_commands_and_show_the_answer(
    shown: Dashboard, screen: Screen, started: SyntheticRun, verb: str, args: dict[str, Any], expected: dict[str, Any]
) -> None:
    thread = threading.Thread(
        target=say, args=(shown,), kwargs={"kind": "ask", "token": "t", "panel": "controls", "verb": verb, "args": args}
    )
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    until(lambda: screen.frame("controls")["waiting"])
    assert "refusal" not in screen.replies["t"]
    assert started.answer() == [verb]
    until(lambda: screen.frame("controls")["acked"] and not screen.frame("controls")["waiting"])
    assert "applied after step 5 on 6 ranks" in screen.frame("controls")["acked"]["text"]
    command = next(event for event in shown.source.feed.recent if event["kind"] == "command")
    assert command["args"] == expected


def test_a_refused_command_is_told_to_the_view(started: SyntheticRun, screen: Screen) -> None:
    class Refusing(InboxRun):
        def set(self, key: str, value: Any) -> None:
            raise PlanError("train.language.lr must be at least 0")

    dashboard = Dashboard(Refusing(started.dir), started.dir, period=0.02)
    args = {"key": "train.language.lr", "value": -1}
    say(dashboard, kind="ask", token="a", panel="controls", verb="set", args=args)
    say(dashboard, kind="ask", token="b", panel="controls", verb="explode", args={})
    say(dashboard, kind="ask", token="c", panel="nowhere", verb="pause")
    refusals = {token: reply["refusal"] for token, reply in screen.replies.items()}
    assert refusals == {
        "a": "train.language.lr must be at least 0", "b": "unknown command 'explode'", "c": "no panel 'nowhere'",
    }  # fmt: skip
    assert Controls(RunSource(InboxRun(started.dir), started.dir)).frame()["waiting"] == []
    dashboard.close()


class Shell:
    """The part of an IPython shell that shows objects."""

    def __init__(self) -> None:
        from IPython.core.formatters import DisplayFormatter

        self.display_formatter = DisplayFormatter()


def test_runs_show_as_dashboards_in_a_shell(started: SyntheticRun, screen: Screen) -> None:
    from mmlab.lab import Run

    shell = Shell()
    install(shell)
    install(shell)
    started.train(2)
    run = Run(started.dir)
    assert shell.display_formatter.ipython_display_formatter(run)
    assert shell.display_formatter.ipython_display_formatter(run)
    assert len(screen.outputs) == 2
    views = {output["application/vnd.jupyter.widget-view+json"]["model_id"] for output in screen.outputs.values()}
    assert len(views) == 1
    started.finish()
    until(lambda: all("finished" in output["text/plain"] for output in screen.outputs.values()))


def test_an_ended_run_shows_its_picture(started: SyntheticRun, screen: Screen) -> None:
    from mmlab.lab import Run

    started.train(2)
    started.finish()
    Faces().show(Run(started.dir))
    (output,) = screen.outputs.values()
    assert set(output) == {"image/png", "text/plain"}
