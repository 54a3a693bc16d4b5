"""The DALI backend against Pillow's pixels. Skipped where NVIDIA DALI is not installed (pip install "mmlab[dali]")."""

import sys

import numpy as np
import pytest
import torch
from data_helpers import encode, picture, small_plan, write_tar
from PIL import Image, ImageFilter

from mmlab.data.dali import DaliDecoder, takes
from mmlab.data.decode import decode_into, open_rgb
from mmlab.data.pipeline import DataSource
from mmlab.data.prefetch import Prefetcher
from mmlab.data.tiling import Grid, Picture, cut
from mmlab.errors import DataError
from mmlab.plan import Plan

SIDE = 64
GRID = Grid(3, 2, thumbnail=True)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MMLAB_DATA", str(tmp_path / "cache"))


def natural(width, height, seed=0):
    """Smooth shapes with noise, as a photo has both."""
    random = np.random.default_rng(seed)
    coarse = random.integers(0, 256, (9, 12, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
    noise = Image.fromarray(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
    return Image.blend(image, noise.filter(ImageFilter.GaussianBlur(1)), 0.2)


def jpeg(image, **save):
    return encode(image, format="JPEG", quality=92, **save)


def turned(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    return jpeg(natural(300, 200, orientation), exif=exif)


def decoded(tmp_path, files, grid, workers=1):
    """(tiles by DALI, reasons) of pictures behind one another in one file."""
    shard = tmp_path / "pictures"
    shard.write_bytes(b"".join(files))
    starts = np.cumsum([0, *map(len, files)])
    decoder = DaliDecoder([shard], SIDE, workers)
    try:
        return decoder.start([Picture(0, int(s), len(f), grid) for s, f in zip(starts, files, strict=False)]).result()
    finally:
        decoder.close()


def by_pillow(files, grid):
    tiles = np.empty((len(files) * grid.tiles, 3, SIDE, SIDE), dtype=np.uint8)
    places = np.split(tiles, len(files))
    return tiles, [decode_into(place, data, grid) for place, data in zip(places, files, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("grid", [Grid(), GRID], ids=["whole", "tiles"])
def test_pixels_are_those_of_pillow_within_its_scaled_decoding(tmp_path, grid):
    pytest.importorskip("nvidia.dali")
    files = [jpeg(natural(500, 375)), jpeg(natural(1600, 1200)), jpeg(natural(900, 400), progressive=True)]
    files += [jpeg(natural(120, 300).convert("L")), *map(turned, range(1, 9))]
    assert all(map(takes, files))
    tiles, reasons = decoded(tmp_path, files, grid)
    assert reasons == [""] * len(files)
    whole = np.concatenate([cut(open_rgb(data), SIDE, grid) for data in files]).transpose(0, 3, 1, 2)
    difference = np.abs(tiles.astype(int) - whole).reshape(len(tiles), -1)
    assert difference.mean(axis=1).max() < 0.3  # of a picture decoded at its full size
    assert difference.max() <= 2
    scaled = np.abs(tiles.astype(int) - by_pillow(files, grid)[0]).reshape(len(tiles), -1)
    assert scaled.mean(axis=1).max() < 2.0  # of one decoded at the smallest size that covers the grid


@pytest.mark.slow
def test_what_dali_does_not_take_or_cannot_decode_is_pillows(tmp_path):
    pytest.importorskip("nvidia.dali")
    whole = jpeg(natural(200, 150))
    damaged = whole[:2] + b"\xff\xc0\x00\x0b\x08\x00\x10\x00\x10\x01\x01\x11\x00" + b"\xff\xd9"  # a header and no scan
    files = [picture((200, 0, 0, 128)), jpeg(natural(64, 64).convert("CMYK")), whole[:900], b"", b"no picture"]
    files += [encode(Image.fromarray(np.full((20, 30), 40_000, dtype=np.uint16)))]
    assert not any(map(takes, files))
    for odd in (files, [whole, damaged]):
        tiles, reasons = decoded(tmp_path, odd, Grid())
        expected, told = by_pillow(odd, Grid())
        assert (tiles == expected).all()
        assert reasons == told
    assert takes(damaged)
    assert [bool(reason) for reason in told] == [False, True]
    tiles, reasons = decoded(tmp_path, [damaged] * 8 + [whole], Grid())  # the pipeline is made anew
    assert [bool(reason) for reason in reasons] == [True] * 8 + [False]
    assert np.abs(tiles[-1].astype(int) - by_pillow([whole], Grid())[0][0]).mean() < 1.0


@pytest.mark.slow
def test_a_source_is_decoded_by_dali_as_the_plan_says(tmp_path):
    pytest.importorskip("nvidia.dali")
    files = [(f"{i}.{end}", data) for i in range(6) for end, data in (("jpg", turned(i)), ("txt", b"a caption"))]
    write_tar(tmp_path / "set" / "a.tar", [*files, ("6.png", b"broken"), ("6.txt", b"and one more")])
    source = DataSource(small_plan(tmp_path / "set", data={"global_batch": 7}))
    manifest, _ = source.manifest(1, source.start())
    with Prefetcher(source, 2, "dali") as prefetcher:
        prefetcher.submit(manifest, range(7))
        pixels, bad = prefetcher.take(manifest)
    expected, expected_bad = source.pixels(manifest, range(7))
    assert bad == expected_bad
    assert len(bad) == 1
    assert (torch.cat(list(pixels.values())) - expected).abs().mean() < 1 / 127.5
    source.close()


def test_without_dali_the_plan_is_refused_and_a_rank_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    plan = Plan.preset("quickstart").with_("data.backend=dali")
    (problem,) = plan.check()
    assert problem.field == "data.backend"
    assert 'pip install "mmlab[dali]"' in problem.message
    assert not plan.with_(problem.fix).check()
    with pytest.raises(DataError, match=r'pip install "mmlab\[dali\]" there, or set data.backend=pillow'):
        DaliDecoder([], 32)
