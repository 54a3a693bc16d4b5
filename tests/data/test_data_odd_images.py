"""Odd pictures against what is known of them: source pixels put together by NumPy, or Pillow's whole decoding."""

import io
import struct
import zlib

import numpy as np
import pytest
from data_helpers import encode, pixels_of
from PIL import Image

from mmlab.data.decode import decode, open_rgb
from mmlab.data.tiling import Grid

SIDE = 32
TURNS = {
    1: lambda a: a, 2: lambda a: a[:, ::-1], 3: lambda a: a[::-1, ::-1], 4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2), 6: lambda a: np.rot90(a, -1), 7: lambda a: np.rot90(a, -1)[::-1],
    8: lambda a: np.rot90(a),
}  # fmt: skip
"""What a viewer does to stored pixels for each EXIF orientation."""


def smooth(width, height, channels=3, seed=1):
    """Slow waves, which JPEG and scaled decoding keep."""
    y, x = np.mgrid[0:height, 0:width] / max(width, height)
    waves = [np.sin(6 * x + 4 * y * (k + 1) + seed + 2 * k) for k in range(channels)]
    return np.rint(127.5 + 120 * np.stack(waves, axis=-1)).astype(np.uint8)


def jpeg(image, **save):
    return encode(image, format="JPEG", quality=95, **save)


def whole(data, width=SIDE, height=SIDE):
    """A picture that Pillow decodes without our help, resized."""
    image = Image.open(io.BytesIO(data)).convert("RGB")
    return pixels_of(image.resize((width, height), Image.Resampling.BICUBIC)).astype(int)


def resized(pixels, width=SIDE, height=SIDE):
    image = Image.fromarray(np.ascontiguousarray(pixels))
    return pixels_of(image.resize((width, height), Image.Resampling.BICUBIC)).astype(int)


def difference(data, expected):
    """(mean, largest) difference of our tile from what it should be."""
    decoded = decode(data, SIDE)
    assert decoded.reason == ""
    assert decoded.pixels.shape == (1, SIDE, SIDE, 3)
    apart = np.abs(decoded.pixels[0].astype(int) - expected)
    return apart.mean(), apart.max()


@pytest.mark.parametrize("size", [(40, 30), (500, 375), (1600, 1200)])
@pytest.mark.parametrize("progressive", [False, True])
def test_jpeg_reduced_while_decoding_is_the_whole_one(size, progressive):
    data = jpeg(Image.fromarray(smooth(*size)), progressive=progressive)
    mean, most = difference(data, whole(data))
    assert mean < 1
    assert most < 12


def test_grey_jpeg():
    grey = smooth(800, 600, 1)[..., 0]
    data = jpeg(Image.fromarray(grey))
    assert difference(data, resized(np.stack([grey] * 3, axis=-1)))[0] < 1


def without_adobe(data):
    """A JPEG without its APP14 marker."""
    at = data.index(b"\xff\xee")
    return data[:at] + data[at + 2 + struct.unpack(">H", data[at + 2 : at + 4])[0] :]


@pytest.mark.parametrize("adobe", [True, False])
@pytest.mark.parametrize("size", [(40, 30), (640, 480)])
def test_cmyk_jpeg_inverted_by_adobe_or_not(adobe, size):
    inks = smooth(*size, channels=4)
    inks[..., 3] //= 2
    stored = inks if adobe else 255 - inks
    data = jpeg(Image.fromarray(stored, mode="CMYK"), subsampling=0)
    if not adobe:
        data = without_adobe(data)
    c, k = inks[..., :3].astype(int), inks[..., 3:].astype(int)
    expected = ((255 - c) * (255 - k) / 255).round().astype(np.uint8)
    assert difference(data, resized(expected))[0] < 2


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_with_reduced_decoding_and_tiles(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = smooth(900, 400)
    upright = TURNS[orientation](stored)
    data = jpeg(Image.fromarray(stored), exif=exif)
    assert difference(data, resized(upright))[0] < 1
    tall = upright.shape[0] > upright.shape[1]
    grid = Grid(1, 2, thumbnail=True) if tall else Grid(2, 1, thumbnail=True)
    tiles = decode(data, SIDE, grid).pixels.astype(int)
    both = resized(upright, SIDE * grid.columns, SIDE * grid.rows)
    halves = np.split(both, 2, axis=0 if tall else 1)
    for tile, expected in zip(tiles, [*halves, resized(upright)], strict=True):
        assert np.abs(tile - expected).mean() < 1


@pytest.mark.parametrize(("format", "order"), [("PNG", "<"), ("TIFF", "<"), ("TIFF", ">")])
def test_16_bit_grey(format, order):
    levels = (smooth(48, 40, 1)[..., 0].astype(np.uint16) * 257) + 1
    image = Image.frombytes("I;16B" if order == ">" else "I;16", (48, 40), levels.astype(f"{order}u2").tobytes())
    _, most = difference(encode(image, format=format), resized(np.stack([levels // 257] * 3, -1).astype(np.uint8)))
    assert most <= 1


def png(width, height, bits, kind, rows):
    """A PNG by its own definition; `kind` 0 grey, 2 RGB, 4 grey with alpha, 6 RGBA."""
    header = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)
    parts = [(b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b"")]
    found = b"".join(
        struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body)) for name, body in parts
    )
    return b"\x89PNG\r\n\x1a\n" + found


@pytest.mark.parametrize(("kind", "channels"), [(2, 3), (4, 2), (6, 4)])
def test_16_bit_colour_and_transparent_png(kind, channels):
    levels = smooth(SIDE, SIDE, channels)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in levels.astype(np.uint16) * 257)
    colour = np.repeat(levels[..., :1], 3, -1) if channels == 2 else levels[..., :3]
    alpha = levels[..., -1:] / 255 if channels != 3 else 1.0
    expected = np.rint(colour * alpha + 255 * (1 - alpha)).astype(int)
    assert difference(png(SIDE, SIDE, 16, kind, rows), expected)[1] <= 1


@pytest.mark.parametrize("transparent", ["none", "one", "each"])
def test_palettes(transparent):
    random = np.random.default_rng(3)
    palette, places = random.integers(0, 256, (256, 3), dtype=np.uint8), random.integers(0, 256, (SIDE, SIDE))
    image = Image.frombytes("P", (SIDE, SIDE), places.astype(np.uint8).tobytes())
    image.putpalette(palette.tobytes())
    alpha = np.full(256, 255)
    save = {}
    if transparent == "one":
        alpha[7], save = 0, {"transparency": 7}
    elif transparent == "each":
        alpha = random.integers(0, 256, 256)
        save = {"transparency": bytes(alpha.astype(np.uint8))}
    share = alpha[places][..., None] / 255
    expected = np.rint(palette[places] * share + 255 * (1 - share)).astype(int)
    assert difference(encode(image, **save), expected)[1] <= 1


@pytest.mark.parametrize("size", [(1, 1), (1, 3000), (20_000, 2), (16, 16)])
@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP"])
def test_extreme_shapes(size, format):
    if format == "WEBP" and max(size) > 16_383:
        size = (16_383, 2)
    data = encode(Image.fromarray(smooth(*size)), format=format, quality=95)
    assert difference(data, whole(data))[1] <= 1
    wide = decode(data, 16, Grid(6, 1, thumbnail=True))
    assert wide.reason == ""
    assert np.abs(np.concatenate(wide.pixels[:6], axis=1).astype(int) - whole(data, 96, 16)).max() <= 1


@pytest.mark.parametrize("width", [224, 225, 447, 448, 449, 895, 896, 1785, 1791, 1792, 4000])
def test_the_smallest_size_that_covers_is_decoded(width):
    least = (224, 96)
    data = jpeg(Image.new("RGB", (width, width * 3 // 4)))
    found = open_rgb(data, least).size
    sizes = [(-(-width // s), -(-(width * 3 // 4) // s)) for s in (8, 4, 2, 1)]
    assert found == next(size for size in sizes if size[0] >= least[0] and size[1] >= least[1])


def bomb(width, height):
    return png(width, height, 1, 0, b"")


def jpeg_bomb():
    data = jpeg(Image.new("RGB", (16, 16)))
    at = data.index(b"\xff\xc0")
    return data[: at + 5] + struct.pack(">HH", 65_000, 65_000) + data[at + 9 :]


def half(data):
    return data[: len(data) // 2]


LARGE = jpeg(Image.fromarray(smooth(800, 600)))
DAMAGED = {
    "half a jpeg": half(LARGE),
    "half a progressive jpeg": half(jpeg(Image.fromarray(smooth(800, 600)), progressive=True)),
    "all but the end of a jpeg": LARGE[:-40],
    "half a png": half(encode(Image.fromarray(smooth(64, 64)))),
    "half a webp": half(encode(Image.fromarray(smooth(64, 64)), format="WEBP")),
    "zero bytes": b"",
    "zeros": bytes(4096),
    "a header": LARGE[:20],
    "png of 3.6 gigapixels": bomb(60_000, 60_000),
    "jpeg of 4.2 gigapixels": jpeg_bomb(),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_pictures_and_bombs_are_bad_with_a_reason(name):
    for grid in (Grid(), Grid(2, 1, thumbnail=True)):
        decoded = decode(DAMAGED[name], SIDE, grid)
        assert decoded.reason
        assert len(decoded.reason) < 200
        assert "0x" not in decoded.reason
        assert decoded.pixels.shape == (grid.tiles, SIDE, SIDE, 3)
        assert not decoded.pixels.any()
