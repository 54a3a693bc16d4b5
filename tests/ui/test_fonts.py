"""Characters that Pillow's own font lacks: from a font of the machine, else boxes and a line that says what to do."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from PIL import Image

from mmlab.ui import fonts, picture
from mmlab.ui.snapshot import snapshot
from ui.synthetic import SyntheticRun


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A machine without fonts and fontconfig; the folder in which it looks."""
    folder = tmp_path / "fonts"
    folder.mkdir()
    monkeypatch.setattr(fonts, "FOLDERS", (str(folder),))
    monkeypatch.setattr(fonts.shutil, "which", lambda _: None)
    fonts.finder.cache_clear()
    fonts._known.cache_clear()
    yield folder
    fonts.finder.cache_clear()
    fonts._known.cache_clear()


def write_font(path: Path, characters: str) -> None:
    """A font that draws each of these characters as a filled square of its own size."""
    names = [".notdef", *(f"c{ord(character):x}" for character in characters)]
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder(names)
    builder.setupCharacterMap({ord(character): name for character, name in zip(characters, names[1:], strict=True)})
    glyphs = {}
    for index, name in enumerate(names):
        pen = TTGlyphPen(None)
        side = 600 + 100 * index
        pen.moveTo((0, 0))
        for corner in ((0, side), (side, side), (side, 0)):
            pen.lineTo(corner)
        pen.closePath()
        glyphs[name] = pen.glyph()
    builder.setupGlyf(glyphs)
    builder.setupHorizontalMetrics(dict.fromkeys(names, (1000, 0)))
    builder.setupHorizontalHeader(ascent=900, descent=-100)
    builder.setupNameTable({"familyName": "Squares", "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(path)


def test_latin_needs_no_font_of_the_machine(bare: Path) -> None:
    assert list(fonts.pieces("loss 0.5, step 3")) == [("", "loss 0.5, step 3")]
    assert fonts.advice("loss 0.5") == ""


def test_without_a_font_there_are_boxes_and_advice(bare: Path) -> None:
    assert list(fonts.pieces("a 猫脸 b")) == [("", "a "), ("", 2 * fonts.BOX), ("", " b")]
    assert fonts.lacking("猫脸猫") == ["猫", "脸"]
    assert "猫 脸" in fonts.advice("a 猫脸")
    assert "fonts-wqy-microhei" in fonts.advice("a 猫脸")


def test_a_font_that_is_there_is_taken_for_what_it_has(bare: Path) -> None:
    write_font(bare / "wqy-test.ttf", "猫脸")
    (bare / "NotoSans-Regular.ttf").write_bytes(b"no font")
    path = str(bare / "wqy-test.ttf")
    assert list(fonts.pieces("a 猫脸 車")) == [("", "a "), (path, "猫脸"), ("", " "), ("", fonts.BOX)]
    assert fonts.lacking("猫車") == ["車"]


def captioned(run: SyntheticRun, truth: str) -> None:
    run.train(3)
    run.evaluate()
    event = {"step": run.step, "folder": str(run.paths.samples / f"step-{run.step:06d}")}
    run.events.emit("samples", items=[{"image": "0.png", "prompt": "?", "truth": truth, "text": "a cat"}], **event)


def test_captions_are_drawn_in_the_picture(bare: Path, started: SyntheticRun) -> None:
    captioned(started, "猫")
    without = snapshot(started.dir)
    assert "in the picture: no font of this machine has 猫" in without.text
    write_font(bare / "wqy-test.ttf", "猫")
    fonts.finder.cache_clear()
    fonts._known.cache_clear()
    shown = snapshot(started.dir)
    assert "no font" not in shown.text
    heights = [Image.open(io.BytesIO(each.png)).height for each in (without, shown)]
    assert heights[0] - heights[1] == 22 * picture.SCALE  # the line of advice
    caption = Image.open(io.BytesIO(shown.png)).convert("L").crop((32, heights[1] - 60, 60, heights[1] - 20))
    ink = sum(caption.histogram()[:160])
    assert ink > 150  # a filled square, not an outline


def test_a_font_of_this_machine_is_found_where_fontconfig_knows_one() -> None:
    path = fonts.finder("中")
    assert path is None or (Path(path).is_file() and fonts.covers(path, "中"))
