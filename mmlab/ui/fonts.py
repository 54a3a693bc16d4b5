"""Fonts for pictures: Pillow's own has basic Latin alone, what it lacks comes from a font of this machine.

Nothing is downloaded. A character that no font here has is drawn as a box, and `advice` says what to install.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from pathlib import Path

from PIL import ImageFont

FOLDERS = (
    "/usr/share/fonts", "/usr/local/share/fonts", "~/.local/share/fonts", "~/.fonts",
    "/System/Library/Fonts", "/Library/Fonts", "~/Library/Fonts", "/mnt/c/Windows/Fonts",
)  # fmt: skip
"""Where fonts lie on Linux, macOS and Windows below WSL."""
KNOWN = (
    "DejaVuSans.ttf", "LiberationSans-Regular.ttf", "NotoSans-Regular.ttf", "NotoSansCJK-Regular.ttc",
    "NotoSansCJKsc-Regular.otf", "NotoSansSC*.ttf", "SourceHanSans*.otf", "SourceHanSans*.ttc", "wqy-*.ttc",
    "wqy-*.ttf", "DroidSansFallback*.ttf", "uming.ttc", "ukai.ttc", "PingFang.ttc", "Hiragino*.ttc", "STHeiti*.ttc",
    "Arial Unicode.ttf", "msyh.ttc", "simsun.ttc", "seguisym.ttf",
)  # fmt: skip
"""File names of fonts with much beside basic Latin, in the order in which they are tried."""
PACKAGES = "fonts-noto-cjk or fonts-wqy-microhei"
"""Debian packages with Chinese, Japanese and Korean characters."""
BOX = "\x00"
"""Stands for a character that no font has."""
NOBODYS = "\U0010ffff"
"""Is no character: fonts draw what they draw for all that they lack."""

Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@lru_cache(512)
def font(path: str, size: float) -> Font:
    """The font of a file; of no path Pillow's own."""
    return ImageFont.truetype(path, size) if path else ImageFont.load_default(size)


@lru_cache(4096)
def covers(path: str, character: str) -> bool:
    """Whether a font has a character, or needs nothing for it (blanks)."""
    if character.isspace():
        return True
    drawn = font(path, 24).getmask(character)
    lacking = font(path, 24).getmask(NOBODYS)
    return drawn.size[0] > 0 and (drawn.size != lacking.size or bytes(drawn) != bytes(lacking))


@lru_cache(4096)
def finder(character: str) -> str | None:
    """The file of a font that has a character: "" for Pillow's own, None for no font of this machine."""
    if covers("", character):
        return ""
    for path in (*_known(), *_asked(character)):
        try:
            if covers(path, character):
                return path
        except OSError:  # a format that FreeType was built without
            continue
    return None


@lru_cache(1)
def _known() -> tuple[str, ...]:
    """Those of KNOWN that are there."""
    found: list[Path] = []
    for folder in (Path(name).expanduser() for name in FOLDERS):
        if folder.is_dir():
            found += folder.rglob("*.[to]t[fc]")
    return tuple(str(path) for pattern in KNOWN for path in sorted(found) if path.match(pattern))


def _asked(character: str) -> tuple[str, ...]:
    """What fontconfig names; it names something for whatever it is asked."""
    program = shutil.which("fc-match")
    if program is None:
        return ()
    asked = [program, "-f", "%{file}", f":charset={ord(character):x}:scalable=true"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return (said.stdout.strip(),) if said.stdout.strip() else ()


def pieces(text: str) -> Iterator[tuple[str, str]]:
    """(path, piece) of a text, each piece in one font; BOX for each character that none has."""
    for path, characters in groupby(text, finder):
        piece = "".join(characters)
        yield (path, piece) if path is not None else ("", BOX * len(piece))


def lacking(text: str) -> list[str]:
    """The characters of a text that no font of this machine has, each once."""
    return sorted({character for character in text if finder(character) is None})


def advice(text: str) -> str:
    """What to install so that a text can be drawn; empty where it can."""
    missing = lacking(text)
    if not missing:
        return ""
    shown = " ".join(missing[:8]) + (" ..." if len(missing) > 8 else "")
    return f"no font of this machine has {shown}; drawn as boxes. Install one, such as Debian's {PACKAGES}"
