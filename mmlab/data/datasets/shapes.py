"""The shapes set: drawn scenes whose content is known exactly, with captions and question-answer pairs.

A scene has one to four shapes of known kind, colour, size and place (a cell of a 3 x 3 grid). Its json holds the ground
truth beside the conversation: `objects` with `shape`, `colour`, `size`, `place` and `box` (left, top, right, bottom in
pixels, the last two inclusive), and `size` of the picture. Everything follows from the seed. Scenes with the same
content (kinds, colours and places) are on one side of the held-out split.
"""

from __future__ import annotations

import hashlib
import io
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from PIL import Image, ImageDraw

from mmlab.data.datasets.colours import join
from mmlab.data.index import Progress
from mmlab.data.write import NewSample, SetInfo, conversation, write_set

T = TypeVar("T")
VERSION = "1"
"""Changes whenever this file makes another set from the same seed."""
SIZE = 96
CELL = SIZE // 3
SAMPLES = 4000
HELD_OUT_SAMPLES = 400
HELD_OUT_PERCENT = 10
VOCAB_SIZE = 512
BACKGROUND = (245, 245, 245)
RGB = {
    "red": (214, 39, 40),
    "green": (44, 160, 44),
    "blue": (31, 81, 200),
    "yellow": (245, 205, 25),
    "purple": (140, 60, 180),
    "orange": (250, 130, 20),
    "black": (25, 25, 25),
    "brown": (120, 70, 35),
}
SHAPES = ("circle", "square", "triangle", "diamond")
RADII = {"small": 7, "large": 13}
PLACES = tuple(
    " ".join(word for word in (row, column) if word) or "middle"
    for row in ("top", "", "bottom")
    for column in ("left", "", "right")
)
"""Names of the cells, row by row: "top left", "top", ..., "left", "middle", ..."""
NUMBERS = ("no", "one", "two", "three", "four")


@dataclass(frozen=True)
class Shape:
    """One drawn shape and where it is."""

    shape: str
    colour: str
    size: str
    place: str
    box: tuple[int, int, int, int]


class Dice:
    """Choices that follow from a key alone, on every machine and version of Python."""

    def __init__(self, *key: object) -> None:
        self._key = "/".join(map(str, key))
        self._rolls = 0

    def below(self, n: int) -> int:
        """An integer in 0..n-1."""
        self._rolls += 1
        digest = hashlib.sha256(f"{self._key}/{self._rolls}".encode()).digest()
        return int.from_bytes(digest[:8], "big") % n

    def pick(self, options: Sequence[T]) -> T:
        """One of the options."""
        return options[self.below(len(options))]


def scene(seed: int, number: int) -> list[Shape]:
    """The shapes of scene `number`, in reading order."""
    dice = Dice("scene", seed, number)
    cells = sorted(range(9), key=lambda cell: Dice("cell", seed, number, cell).below(1 << 32))
    shapes = []
    for cell in sorted(cells[: 1 + dice.below(4)]):
        size = dice.pick(tuple(RADII))
        slack = CELL // 2 - RADII[size] - 1  # whole inside its cell, so that shapes never touch
        x = cell % 3 * CELL + CELL // 2 + dice.below(2 * slack + 1) - slack
        y = cell // 3 * CELL + CELL // 2 + dice.below(2 * slack + 1) - slack
        r = RADII[size]
        box = (x - r, y - r, x + r, y + r)
        shapes.append(Shape(dice.pick(SHAPES), dice.pick(tuple(RGB)), size, PLACES[cell], box))
    return shapes


def draw(shapes: Sequence[Shape]) -> Image.Image:
    """The picture, RGB, `SIZE` x `SIZE`, without smoothed edges: each pixel is background or a shape's colour."""
    image = Image.new("RGB", (SIZE, SIZE), BACKGROUND)
    pen = ImageDraw.Draw(image)
    for item in shapes:
        left, top, right, bottom = item.box
        x, y, fill = (left + right) // 2, (top + bottom) // 2, RGB[item.colour]
        if item.shape == "circle":
            pen.ellipse(item.box, fill=fill)
        elif item.shape == "square":
            pen.rectangle(item.box, fill=fill)
        elif item.shape == "triangle":
            pen.polygon([(x, top), (right, bottom), (left, bottom)], fill=fill)
        else:
            pen.polygon([(x, top), (right, y), (x, bottom), (left, y)], fill=fill)
    return image


def _at(place: str) -> str:
    return f"in the {place}" if place == "middle" else f"at the {place}"


def _article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def caption(shapes: Sequence[Shape]) -> str:
    """ "a small red circle at the top left and a large blue square in the middle."."""
    return join([f"{_article(f'{s.size} {s.colour} {s.shape}')} {_at(s.place)}" for s in shapes]) + "."


def _count_question(shapes: Sequence[Shape], dice: Dice) -> tuple[str, str]:
    if dice.below(2):
        return "how many shapes are there?", f"{NUMBERS[len(shapes)]}."
    kind = dice.pick(SHAPES)
    return f"how many {kind}s are there?", f"{NUMBERS[sum(s.shape == kind for s in shapes)]}."


def _colour_question(shapes: Sequence[Shape], dice: Dice) -> tuple[str, str]:
    item = dice.pick(shapes)
    kinds = Counter(s.shape for s in shapes)
    if kinds[item.shape] == 1:
        return f"what colour is the {item.shape}?", f"{item.colour}."
    return f"what colour is the shape {_at(item.place)}?", f"{item.colour}."


def _shape_question(shapes: Sequence[Shape], dice: Dice) -> tuple[str, str]:
    item = dice.pick(shapes)
    return f"what is {_at(item.place)}?", f"{_article(f'{item.colour} {item.shape}')}."


def _place_question(shapes: Sequence[Shape], dice: Dice) -> tuple[str, str]:
    looks = Counter((s.colour, s.shape) for s in shapes)
    only = [s for s in shapes if looks[s.colour, s.shape] == 1]
    if not only:
        return _shape_question(shapes, dice)
    item = dice.pick(only)
    return f"where is the {item.colour} {item.shape}?", f"{_at(item.place)}."


def _presence_question(shapes: Sequence[Shape], dice: Dice) -> tuple[str, str]:
    """Asked about what is there half of the time, so that yes and no are about equally likely."""
    there = {(s.colour, s.shape) for s in shapes}
    colour, kind = dice.pick(sorted(there)) if dice.below(2) else (dice.pick(tuple(RGB)), dice.pick(SHAPES))
    return f"is there {_article(f'{colour} {kind}')}?", "yes." if (colour, kind) in there else "no."


QUESTIONS: tuple[Callable[[Sequence[Shape], Dice], tuple[str, str]], ...] = (
    _count_question,
    _colour_question,
    _shape_question,
    _place_question,
    _presence_question,
)


def turns_of(shapes: Sequence[Shape], seed: int, number: int) -> list[tuple[str, str]]:
    """A caption, or two questions of different kinds, each with its answer."""
    dice = Dice("turns", seed, number)
    if dice.below(3) == 0:
        return [(dice.pick(("describe the picture:", "what do you see?")), caption(shapes))]
    first = dice.below(len(QUESTIONS))
    second = (first + 1 + dice.below(len(QUESTIONS) - 1)) % len(QUESTIONS)
    turns = [QUESTIONS[first](shapes, dice), QUESTIONS[second](shapes, dice)]
    return turns if turns[0][0] != turns[1][0] else turns[:1]


def is_held_out(shapes: Sequence[Shape]) -> bool:
    """Whether scenes with this content are held out."""
    return Dice("split", *sorted(f"{s.shape} {s.colour} {s.place}" for s in shapes)).below(100) < HELD_OUT_PERCENT


def _sample(shapes: Sequence[Shape], seed: int, number: int) -> NewSample:
    buffer = io.BytesIO()
    draw(shapes).save(buffer, format="PNG", compress_level=1)
    truth = {
        "size": [SIZE, SIZE],
        "objects": [dict(vars(item)) for item in shapes],
        "conversations": conversation(turns_of(shapes, seed, number)),
    }
    return NewSample(f"{number:08d}", buffer.getvalue(), truth)


def build(folder: Path, samples: int | None = None, seed: int = 0, progress: Progress | None = None) -> None:
    """Write the set into an existing folder: `samples` training scenes (default 4,000) and a tenth as many held out."""
    wanted = {"train": samples or SAMPLES, "held_out": max(1, samples // 10) if samples else HELD_OUT_SAMPLES}
    found: dict[str, list[NewSample]] = {split: [] for split in wanted}
    number = 0
    while any(len(found[split]) < wanted[split] for split in wanted):
        shapes = scene(seed, number)
        split = "held_out" if is_held_out(shapes) else "train"
        if len(found[split]) < wanted[split]:
            found[split].append(_sample(shapes, seed, number))
        if progress and number % 500 == 0:
            progress(sum(map(len, found.values())), sum(wanted.values()), "drawing scenes")
        number += 1
    info = SetInfo("shapes", VERSION, f"drawn by mmlab, seed {seed}", "CC0-1.0")
    write_set(folder, info, found, VOCAB_SIZE, progress)
