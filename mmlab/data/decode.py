"""Bytes of a picture to squares of RGB. No torch: decode processes start in a fraction of a second."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass

import numpy as np
from PIL import ExifTags, Image, ImageChops, ImageOps, UnidentifiedImageError

from mmlab.data.tiling import WHOLE, Box, Grid, cut


@dataclass(frozen=True)
class Decoded:
    """`pixels` uint8 [tiles, S, S, 3]; zeros and a `reason` where the picture cannot be decoded."""

    pixels: np.ndarray
    reason: str = ""


def to_rgb(image: Image.Image) -> Image.Image:
    """Any mode to 8-bit RGB: transparency over white, 16 bits scaled to 8, EXIF orientation applied. The image itself
    where nothing is to be done."""
    inverted = image.mode == "CMYK" and image.format == "JPEG" and "adobe" not in image.info
    if orientation(image) != 1:
        image = ImageOps.exif_transpose(image)
    if inverted:
        image = ImageChops.invert(image)  # Pillow takes all CMYK for inverted, as only Adobe stores it
    if image.mode.startswith("I;16") or image.mode == "I":
        # 16-bit grey opens as I;16 or, by some formats, as 32-bit I with 16-bit values; convert() would clip at 255.
        grey = np.asarray(image).astype(np.float32) / 257.0
        image = Image.fromarray(np.clip(np.rint(grey), 0, 255).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return image if image.mode == "RGB" else image.convert("RGB")


def orientation(image: Image.Image) -> int:
    """EXIF's orientation of an opened picture, 1 (upright) to 8."""
    found = image.getexif().get(ExifTags.Base.Orientation, 1)
    return found if found in range(2, 9) else 1


def on_its_side(image: Image.Image) -> bool:
    """Whether an opened picture is shown with width and height exchanged (EXIF orientation 5 to 8)."""
    return orientation(image) >= 5


def _reduce(image: Image.Image, width: int, height: int) -> int:
    """Have a JPEG decoded at the smallest of 1/8, 1/4 and 1/2 of its size that covers so many pixels, if any does; how
    many times smaller. Sizes are rounded up.

    Pillow's own choice for a wanted size, by whole multiples, misses those that cover by rounding up (1,791 to 224).
    """
    for scale in (8, 4, 2):
        if -(-image.width // scale) >= width and -(-image.height // scale) >= height:
            image.draft(None, (max(1, image.width // scale), max(1, image.height // scale)))
            return scale
    return 1


def _opened(data: bytes, least: tuple[int, int] | None) -> tuple[Image.Image, Box]:
    """`open_rgb`, and the part (left, top, right, bottom) of its pixels that shows the picture: a size rounded up goes
    past its right and bottom edges as they are stored, which made 2.4 of 255 in the mean of 500 x 375 to 32 x 32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # large pictures and odd metadata are no reason to speak up
        with Image.open(io.BytesIO(data)) as image:
            turn, (width, height), scale = 1, image.size, 1
            if least is not None and image.format in ("JPEG", "MPO"):
                turn = orientation(image)
                scale = _reduce(image, *(reversed(least) if turn >= 5 else least))
            image.load()
            past = image.width - width / scale, image.height - height / scale
            found = to_rgb(image)
    if not any(past):
        return found, (0, 0, found.width, found.height)
    x, y = reversed(past) if turn >= 5 else past
    left, top = (x if turn in (2, 3, 6, 7) else 0.0), (y if turn in (3, 4, 7, 8) else 0.0)
    return found, (left, top, left + found.width - x, top + found.height - y)


def open_rgb(data: bytes, least: tuple[int, int] | None = None) -> Image.Image:
    """The whole picture as RGB. `least`: JPEG may be decoded at the smallest of 1/1, 1/2, 1/4 and 1/8 of its size that
    covers so many pixels (width, height), which is 3 to 9 times faster for large pictures. Raises whatever Pillow
    raises on bytes it cannot decode."""
    return _opened(data, least)[0]


def decode(data: bytes, size: int, grid: Grid = WHOLE) -> Decoded:
    """A picture as the tiles of a grid, each `size` x `size` RGB (`tiling.cut`)."""
    try:
        image, box = _opened(data, (grid.columns * size, grid.rows * size))
        return Decoded(cut(image, size, grid, box))
    except UnidentifiedImageError:  # whose own message has an address in memory
        reason = f"UnidentifiedImageError: {len(data)} bytes in no format that Pillow knows"
    except Exception as error:  # decoders raise all kinds on damaged bytes; the sample is then masked and named
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return Decoded(np.zeros((grid.tiles, size, size, 3), dtype=np.uint8), reason)


def decode_into(tiles: np.ndarray, data: bytes, grid: Grid = WHOLE) -> str:
    """`decode` into uint8 [tiles, 3, S, S]; returns the reason. Planes: to normalise a tile of 224 x 224 takes the rank
    0.04 ms then, 0.6 ms where the pixels are still to be put into planes."""
    decoded = decode(data, tiles.shape[-1], grid)
    np.copyto(tiles, decoded.pixels.transpose(0, 3, 1, 2))
    return decoded.reason
