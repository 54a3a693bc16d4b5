"""Names of the colours in a picture, computed from its pixels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np

COLOURS = (
    "black",
    "grey",
    "white",
    "red",
    "orange",
    "yellow",
    "green",
    "blue",
    "purple",
    "pink",
    "brown",
    "beige",
)


def _hue_saturation_value(rgb: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Hue in degrees, saturation and value in 0..1 of uint8 [n, 3]."""
    x = rgb.astype(np.float64) / 255.0
    high, low = x.max(axis=1), x.min(axis=1)
    chroma = high - low
    safe = np.where(chroma > 0, chroma, 1.0)
    r, g, b = x[:, 0], x[:, 1], x[:, 2]
    sector = np.where(high == r, ((g - b) / safe) % 6, np.where(high == g, (b - r) / safe + 2, (r - g) / safe + 4))
    hue = np.where(chroma > 0, 60.0 * sector, 0.0)
    return hue, np.where(high > 0, chroma / np.where(high > 0, high, 1.0), 0.0), high


def name_colours(rgb: np.ndarray) -> np.ndarray:
    """For each pixel (uint8 [n, 3]) the index of its name in `COLOURS`; int64 [n]. By hue, with greys, browns, beiges
    and pinks told apart by saturation and value."""
    hue, saturation, value = _hue_saturation_value(rgb)
    grey = (saturation < 0.15) | (value < 0.25)
    warm = (hue < 45) | (hue >= 345)
    rules: list[tuple[np.ndarray, str]] = [
        (grey & (value < 0.35), "black"),
        (grey & (value > 0.88), "white"),
        (grey, "grey"),
        (warm & (hue >= 12) & (hue < 345) & (value > 0.8) & (saturation < 0.45), "beige"),
        (warm & (hue >= 12) & (hue < 345) & ((value < 0.8) | (saturation < 0.5)), "brown"),
        (warm & (value < 0.5) & (hue < 345), "brown"),
        (warm & (saturation < 0.6) & (value > 0.75), "pink"),
        ((hue < 12) | (hue >= 345), "red"),
        (hue < 42, "orange"),
        (hue < 70, "yellow"),
        (hue < 170, "green"),
        (hue < 255, "blue"),
        (hue < 300, "purple"),
        (hue < 345, "pink"),
    ]
    return np.select([mask for mask, _ in rules], [COLOURS.index(name) for _, name in rules])


@cache
def _names_of_fives() -> np.ndarray:
    """Names of all colours with 5 bits a channel, int64 [32768]: a table, as thousands of pictures are looked at."""
    fives = np.arange(1 << 15)
    channels = np.stack([fives >> 10, (fives >> 5) & 31, fives & 31], axis=1)
    return name_colours(np.rint(channels * (255 / 31)).astype(np.uint8))


def colour_map(rgba: np.ndarray) -> np.ndarray:
    """For each pixel of uint8 [h, w, 4] the index of its colour's name, -1 where it is transparent; int64 [h, w]."""
    fives = (rgba >> 3).astype(np.int64)
    names = _names_of_fives()[(fives[..., 0] << 10) | (fives[..., 1] << 5) | fives[..., 2]]
    return np.where(rgba[..., 3] >= 128, names, -1)


def colour_shares(names: np.ndarray) -> list[tuple[str, float]]:
    """(name, share of the opaque pixels) of each colour in a piece of a colour map, largest first; empty when fewer
    than 16 pixels are opaque."""
    opaque = names[names >= 0]
    if opaque.size < 16:
        return []
    shares = np.bincount(opaque, minlength=len(COLOURS)) / opaque.size
    return [(COLOURS[i], float(shares[i])) for i in np.argsort(-shares, kind="stable") if shares[i] > 0]


def join(names: Sequence[str]) -> str:
    """ "a", "a and b", "a, b and c"."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
