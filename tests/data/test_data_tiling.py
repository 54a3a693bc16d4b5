"""Grids from sizes alone, tiles cut from pictures, samples that hold what their grids say."""

import numpy as np
import pytest
from data_helpers import conversation_json, encode, numbered_shards, pixels_of, small_plan, write_tar
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mmlab.data.decode import decode
from mmlab.data.index import VERSION, open_index
from mmlab.data.pipeline import DataSource
from mmlab.data.tiling import WHOLE, Grid, Tiling, cut
from mmlab.plan import Plan
from mmlab.plan.sizes import most_tiles

TILING = Tiling(size=448, tokens=256, seq_len=8192, max_tiles=12)
DOWN = Image.linear_gradient("L")
RAMP = Image.merge("RGB", [DOWN, DOWN.rotate(90), Image.new("L", DOWN.size)])


def internvl(width, height, size, most):
    """`find_closest_aspect_ratio` as InternVL has it (Chen et al. 2024)."""
    ratios = {(i, j) for n in range(1, most + 1) for i in range(1, n + 1) for j in range(1, n + 1) if i * j <= most}
    best, least = (1, 1), float("inf")
    for ratio in sorted(ratios, key=lambda r: (r[0] * r[1], r[0])):  # there: by area alone, from a set
        difference = abs(width / height - ratio[0] / ratio[1])
        if difference < least:
            least, best = difference, ratio
        elif difference == least and width * height > 0.5 * size * size * ratio[0] * ratio[1]:
            best = ratio
    return best


@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(2, 20))
def test_the_grid_is_internvls(width, height, most):
    grid = Tiling(448, 256, 9999, most).grid(width, height)
    assert (grid.columns, grid.rows) == internvl(width, height, 448, most)
    assert grid.thumbnail == (grid.columns * grid.rows > 1)


@pytest.mark.parametrize(
    ("size", "grid"),
    [
        ((448, 448), Grid(1, 1)), ((1000, 1000), Grid(3, 3, True)), ((896, 448), Grid(2, 1, True)),
        ((800, 1300), Grid(2, 3, True)), ((20000, 10), Grid(12, 1, True)), ((0, 0), WHOLE),
        ((640, 480), Grid(4, 3, True)),
    ],
)  # fmt: skip
def test_known_grids(size, grid):
    assert TILING.grid(*size) == grid


samples = st.lists(st.sampled_from([0, 0, 3, -4, 60, -90]), min_size=1, max_size=7)


@given(samples, st.integers(8, 300), st.integers(1, 9), st.booleans(), st.integers(0, 10**6))
def test_tiles_never_cost_a_sample_its_text(segments, seq_len, most, thumbnail, seed):
    tiling = Tiling(32, 4, seq_len, most, thumbnail)
    sizes = np.random.default_rng(seed).integers(0, 200, (segments.count(0), 2)).tolist()
    grids = tiling.grids(segments, sizes)
    text = sum(map(abs, segments))
    assert len(grids) == len(sizes)
    assert all(1 <= grid.tiles <= most + thumbnail for grid in grids)
    if text + 4 * len(sizes) <= seq_len + 1:  # it fits with one tile each
        assert text + 4 * sum(grid.tiles for grid in grids) <= seq_len + 1
    else:
        assert all(grid.tiles == 1 for grid in grids)


def test_tiles_lie_row_by_row_and_the_thumbnail_is_last():
    tiles = cut(RAMP, 32, Grid(3, 2, True))
    assert tiles.shape == (7, 32, 32, 3)
    whole = pixels_of(RAMP.resize((96, 64), Image.Resampling.BICUBIC))
    for number in range(6):
        row, column = divmod(number, 3)
        assert (tiles[number] == whole[32 * row : 32 * row + 32, 32 * column : 32 * column + 32]).all()
    assert (tiles[6] == pixels_of(RAMP.resize((32, 32), Image.Resampling.BICUBIC))).all()
    assert (cut(RAMP, 32, WHOLE) == tiles[6:]).all()


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_a_jpeg_on_its_side_is_opened_large_enough_and_cut_upright(orientation):
    """Scaled decoding covers the grid also where width and height are exchanged."""
    stored = RAMP.resize((1600, 400))
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(stored, format="JPEG", quality=95, exif=exif)
    upright = {1: stored, 3: stored.rotate(180), 6: stored.rotate(-90, expand=True), 8: stored.rotate(90, expand=True)}
    grid = Tiling(64, 16, 999, 8).grid(*upright[orientation].size)
    assert grid.columns * grid.rows == 4
    exact = cut(upright[orientation], 64, grid)
    assert np.abs(decode(data, 64, grid).pixels.astype(int) - exact).mean() < 1.5


def test_an_undecodable_picture_keeps_its_tiles():
    decoded = decode(b"\xff\xd8 no picture", 16, Grid(2, 2, True))
    assert decoded.pixels.shape == (5, 16, 16, 3)
    assert decoded.reason
    assert not decoded.pixels.any()


@pytest.fixture
def wide(tmp_path):
    """A wide, a tall (EXIF), an unreadable and a sideways PNG picture; two pictures in one conversation; text."""
    exif = Image.Exif()
    exif[0x0112] = 6
    size = RAMP.resize((128, 64))
    png = encode(size, exif=exif)
    files = [
        ("a.jpg", encode(size, format="JPEG")), ("a.txt", b"wide"),
        ("b.jpg", encode(size, format="JPEG", exif=exif)), ("b.txt", b"tall"),
        ("c.jpg", b"\xff\xd8 broken"), ("c.txt", b"broken"),
        ("d.png", png), ("d.txt", b"tall too"),
        ("e.0.jpg", encode(size, format="JPEG")), ("e.1.jpg", encode(size, format="JPEG")),
        ("e.json", conversation_json(("<image> this?", "one"), ("and <image> this?", "two"))),
        ("f.txt", b"no picture"),
    ]  # fmt: skip
    write_tar(tmp_path / "train-000000.tar", files)
    return tmp_path


def opened(path, **data):
    return DataSource(small_plan(path, data={"global_batch": 6, "lanes": 1, **data}))


def by_key(source):
    manifest, _ = source.manifest(1, source.start())
    return manifest, {sample.key[-1]: position for position, sample in enumerate(manifest.samples)}


def test_a_sample_is_as_long_as_its_tiles(wide):
    source = opened(wide, max_tiles=4, seq_len=96)
    manifest, at = by_key(source)
    grids = {key: manifest.samples[position].grids for key, position in at.items()}
    across, upright = Grid(2, 1, True), Grid(1, 2, True)
    assert grids == {"a": (across,), "b": (upright,), "c": (WHOLE,), "d": (upright,), "e": (across,) * 2, "f": ()}
    pixels, bad = source.pixels(manifest, range(6))
    assert bad == {at["c"]}
    assert len(pixels) == manifest.tiles == 3 + 3 + 1 + 3 + 6
    for position, sample in enumerate(manifest.samples):
        text = source.text(manifest, [position])
        assert (text.tokens, text.image_tokens) == (sample.length, 4 * sample.tiles)
    prompted = source.prompted(manifest.samples[at["e"]])
    assert prompted.grids == (across,)  # the second picture belongs to a later turn
    assert source.prompt(prompted).image_tokens == 12
    source.close()


def test_a_short_sample_has_fewer_tiles_and_one_tile_is_what_it_was(wide):
    source = opened(wide, max_tiles=4, seq_len=18)
    manifest, at = by_key(source)
    assert [manifest.samples[at[key]].tiles for key in "ae"] == [3, 2]
    assert all(sample.length <= 18 for sample in manifest.samples)
    source.close()
    plain, off = opened(wide), opened(wide, thumbnail=False)
    manifest, at = by_key(plain)
    assert [manifest.samples[at[key]].tiles for key in "abcdef"] == [1, 1, 1, 1, 2, 0]
    expected = pixels_of(RAMP.resize((128, 64)).resize((32, 32), Image.Resampling.BICUBIC))
    d = plain.pixels(manifest, [at["d"]])[0][0].permute(1, 2, 0).numpy()
    turned = np.rot90(expected, -1)
    assert np.abs((d + 1) * 127.5 - turned).max() <= 2  # resized after it was turned
    assert by_key(off)[0].samples == manifest.samples
    plain.close()
    off.close()


def test_an_index_of_before_orientation_is_made_anew(tmp_path):
    source = opened(numbered_shards(tmp_path))
    path, tokenizer = source.shards[0], source.tokenizer
    source.close()
    stored = path.parent / f"{path.name}.{tokenizer.digest}.index.npz"
    values = dict(np.load(stored))
    assert values["fingerprint"][0] == VERSION == 2
    values["fingerprint"][0] = 1
    values["images"][:, 2:] = 7
    np.savez(stored, **values)
    assert open_index(path, tokenizer).images[0, 2:].tolist() == [24, 16]


def test_the_largest_number_of_tiles_is_what_the_plan_and_the_sample_hold():
    plan = Plan.model_validate(small_plan("x", data={"seq_len": 200}).model_dump())
    assert [most_tiles(plan.with_(f"data.max_tiles={n}")) for n in (1, 2, 9)] == [1, 3, 10]
    assert most_tiles(plan.with_("data.max_tiles=9", "data.seq_len=22")) == 5
    assert most_tiles(plan.with_("data.max_tiles=9", "data.seq_len=12", "data.thumbnail=false")) == 2
    assert most_tiles(plan.with_("data.max_tiles=9", "data.seq_len=12")) == 1
    for n in (9, 11, 12, 13):  # the rule and the grids agree
        grids = Tiling.of(plan.with_("data.max_tiles=9", f"data.seq_len={n}")).grids([1, 0, -1], [(128, 64)])
        assert (grids[0].tiles > 1) == (most_tiles(plan.with_("data.max_tiles=9", f"data.seq_len={n}")) > 1)
