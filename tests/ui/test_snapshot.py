"""The still view of a run: picture, text and HTML."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from mmlab.ui import picture
from mmlab.ui.snapshot import snapshot, spark
from mmlab.ui.words import command_text, duration, event_text, number
from ui.synthetic import SyntheticRun


def test_text_names_state_step_loss_ranks_and_events(started: SyntheticRun) -> None:
    started.train(12)
    text = snapshot(started.dir).text
    assert "running, step 12 of 120" in text
    assert "tokens/s" in text
    assert "vision powersgd, 18 times fewer bytes" in text
    assert "stage 1 tp 1" in text
    assert text == repr(snapshot(started.dir))


@pytest.mark.parametrize("steps", [0, 1, 50])
def test_picture_is_a_png_at_twice_its_css_size(started: SyntheticRun, steps: int) -> None:
    started.train(steps)
    shown = snapshot(started)
    png, metadata = shown._repr_png_()
    image = Image.open(io.BytesIO(png))
    assert image.format == "PNG"
    assert image.width == 2 * metadata["width"] == 2 * picture.WIDTH
    assert len(image.convert("RGB").getcolors(1 << 20) or []) > 10
    assert len(png) < 200_000
    assert shown.html().startswith('<img src="data:image/png;base64,')


def test_bundle_of_a_failed_run_shows_why(started: SyntheticRun) -> None:
    started.train(4)
    started.finish("failed", "rank 3 (stage 0 tp 1) failed in forward of step 5: boom")
    data, metadata = snapshot(started.dir).bundle()
    assert set(data) == {"image/png", "text/plain"}
    assert "failed in forward of step 5: boom" in data["text/plain"]
    assert metadata["image/png"]["width"] == picture.WIDTH


def test_losses_that_are_no_numbers_are_drawn_as_gaps(started: SyntheticRun) -> None:
    for step, loss in enumerate([2.0, float("nan"), 1.5, float("inf")], 1):
        started.events.emit("step", step=step, loss=loss, tokens_per_s=1.0, images_per_s=None, seconds=0.1)
    assert "loss inf" in snapshot(started.dir).text


def test_many_ranks_are_cut_with_a_note(tmp_path_factory: pytest.TempPathFactory) -> None:
    from mmlab.plan import Plan

    run = SyntheticRun(tmp_path_factory.mktemp("many"), Plan.preset("quickstart").with_("parallel.dp=4"))
    run.start()
    run.train(2)
    height = Image.open(io.BytesIO(snapshot(run.dir).png)).height
    run.close()
    assert height < 2 * 700


def test_numbers_and_times_are_short() -> None:
    assert [number(x) for x in (0.000123, 0.5, 12.345, 4512.3, 0.0, None)] == [
        "1.23e-4", "0.5", "12.3", "4,512", "0", "-",
    ]  # fmt: skip
    assert [duration(x) for x in (3.2, 200, 7500)] == ["3 s", "3 min 20 s", "2 h 05 min"]
    assert spark([1.0, 2.0, 3.0]) == "▁▅█"
    assert spark([]) == ""


def test_events_and_commands_read_as_sentences() -> None:
    assert command_text("set", {"values": {"train.language.lr": 1e-4}}) == "set train.language.lr = 1e-4"
    assert command_text("step", {"n": 3}) == "step 3"
    command = {"kind": "command", "verb": "pause", "ok": True, "step": 7, "ranks": [0, 1], "message": ""}
    assert event_text(command) == "pause: applied after step 7 on 2 ranks"
    assert event_text(command | {"message": "3 of 4 ranks"}).endswith("on 2 ranks (3 of 4 ranks)")
    changed = {"verb": "set", "args": {"values": {"train.steps": 7}}, "message": "train.steps = 7"}
    assert event_text(command | changed) == "set train.steps = 7: applied after step 7 on 2 ranks"
    assert event_text(command | {"ok": False, "message": "ended"}) == "pause: refused (ended)"
    assert event_text({"kind": "bad_image", "sample": "a/1", "reason": "truncated"}) == (
        "image of a/1 cannot be decoded: truncated"
    )
    assert event_text({"kind": "something new"}) == "something new"
