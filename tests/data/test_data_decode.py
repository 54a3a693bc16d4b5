import io

import numpy as np
import pytest
from data_helpers import encode, picture, pixels_of
from PIL import Image

from mmlab.data.decode import decode, open_rgb

GREY = Image.fromarray(np.tile(np.linspace(0, 255, 40).astype(np.uint8), (30, 1)))
RAMP = Image.merge("RGB", (GREY, GREY.transpose(Image.Transpose.FLIP_LEFT_RIGHT), Image.new("L", (40, 30), 90)))


def rgb(data: bytes) -> np.ndarray:
    return pixels_of(open_rgb(data))


def test_lossless_modes_give_the_same_pixels():
    expected = pixels_of(RAMP)
    assert (rgb(encode(RAMP)) == expected).all()
    assert (rgb(encode(RAMP, format="WEBP", lossless=True)) == expected).all()
    assert np.abs(rgb(encode(RAMP.quantize(256))) - expected).mean() < 4  # palette


def test_grey_modes():
    expected = pixels_of(GREY)
    assert (rgb(encode(GREY)) == expected).all()
    sixteen = Image.fromarray(np.asarray(GREY).astype(np.uint16) * 257)
    assert sixteen.mode == "I;16"
    assert (rgb(encode(sixteen)) == expected).all()
    bits = GREY.point(lambda v: 255 if v > 127 else 0).convert("1")
    assert (rgb(encode(bits)) == pixels_of(bits)).all()


def test_transparency_is_composited_on_white():
    half = picture((200, 0, 0, 128))
    assert np.abs(rgb(half)[0, 0] - [227, 127, 127]).max() <= 1
    assert (rgb(picture((200, 0, 0, 0))) == 255).all()
    grey_alpha = encode(Image.merge("LA", (Image.new("L", (8, 8), 0), Image.new("L", (8, 8), 0))))
    assert (rgb(grey_alpha) == 255).all()
    palette = Image.new("P", (8, 8), 1)
    palette.putpalette([0, 0, 0, 250, 0, 0] + [0] * 762)
    assert (rgb(encode(palette)) == [250, 0, 0]).all()
    assert (rgb(encode(palette, transparency=1)) == 255).all()


def test_cmyk_jpeg():
    inks = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    pixel = rgb(encode(inks, format="JPEG", quality=95))[8, 8]
    assert pixel[0] > 200
    assert pixel[1] < 60
    assert pixel[2] < 60


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(orientation):
    upright = np.zeros((32, 48, 3), dtype=np.uint8)
    upright[:16, :24] = [255, 0, 0]  # red at the top left, as a viewer should see it
    image = Image.fromarray(upright)
    # What a camera stores so that turning it by `orientation` gives the upright picture.
    undo = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = image.transpose(undo[orientation]) if orientation in undo else image
    exif = Image.Exif()
    exif[0x0112] = orientation
    for data in (encode(stored, exif=exif), encode(stored, format="JPEG", quality=95, subsampling=0, exif=exif)):
        seen = rgb(data)
        assert seen.shape == (32, 48, 3)
        assert seen[4, 4, 0] > 200
        assert seen[28, 44, 0] < 60


def test_large_jpegs_are_reduced_while_decoding_and_still_right():
    large = RAMP.resize((1200, 900))
    data = encode(large, format="JPEG", quality=95)
    assert open_rgb(data, least=(64, 64)).size == (150, 113)
    assert open_rgb(data).size == (1200, 900)
    exact = pixels_of(large.resize((64, 64), Image.Resampling.BICUBIC))
    assert np.abs(decode(data, 64).pixels - exact).mean() < 2


def test_square_of_the_asked_size():
    decoded = decode(picture((10, 20, 30), (50, 7)), 32)
    assert decoded.pixels.shape == (1, 32, 32, 3)
    assert decoded.pixels.dtype == np.uint8
    assert (decoded.pixels == [10, 20, 30]).all()
    assert decoded.reason == ""


def _png_with_a_broken_checksum() -> bytes:
    data = bytearray(picture(size=(64, 64)))
    data[data.index(b"IDAT") + 8] ^= 0xFF
    return bytes(data)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no picture",
        picture(size=(64, 64))[:60],
        encode(RAMP.resize((400, 300)), format="JPEG")[:900],
        _png_with_a_broken_checksum(),
    ],
    ids=["empty", "text", "cut png", "cut jpeg", "checksum"],
)
def test_what_cannot_be_decoded_is_flagged_with_a_reason(data):
    decoded = decode(data, 16)
    assert decoded.reason
    assert (decoded.pixels == 0).all()
    assert decoded.pixels.shape == (1, 16, 16, 3)


def test_animations_give_their_first_frame():
    buffer = io.BytesIO()
    frames = [Image.new("RGB", (8, 8), color) for color in ((255, 0, 0), (0, 0, 255))]
    frames[0].save(buffer, format="WEBP", save_all=True, append_images=frames[1:], lossless=True)
    assert (rgb(buffer.getvalue()) == [255, 0, 0]).all()
