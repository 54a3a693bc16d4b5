"""Small shards of drawn pictures, with and without text-only samples, and a run that a test can steer."""

import io
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import webdataset as wds
from live import end_left
from PIL import Image, ImageOps

WORDS = ["red", "green", "blue", "square", "circle", "big", "small", "left", "right", "top", "bottom"]


def drawn(size: tuple[int, int], colour: tuple[int, ...]) -> Image.Image:
    """One colour at 40 x 30 pixels, else shaded from top to bottom, so that no two tiles are alike."""
    if size == (40, 30):
        return Image.new("RGB", size, colour)
    return ImageOps.colorize(Image.linear_gradient("L").resize(size), "black", colour)


def write_set(
    folder: Path, samples: int, text_share: float, broken: int = 0, most: int = 1, sizes: tuple = ((40, 30),)
) -> Path:
    """`samples` samples in two shards; about `text_share` without a picture, the others with up to `most` of these
    (width, height); the first `broken` undecodable."""
    folder.mkdir(parents=True)
    random_ = random.Random(7)
    for shard in range(2):
        with wds.TarWriter(str(folder / f"train-{shard:06d}.tar")) as tar:
            for i in range(samples // 2):
                number = shard * (samples // 2) + i
                sample = {"__key__": f"s{number:05d}", "txt": " ".join(random_.choices(WORDS, k=random_.randint(2, 9)))}
                if random_.random() >= text_share:
                    for k in range(random_.randint(1, most) if most > 1 else 1):
                        buffer, colour = io.BytesIO(), tuple(random_.choices(range(256), k=3))
                        drawn(sizes[(number + k) % len(sizes)], colour).save(buffer, "PNG")
                        name = f"{k}.png" if most > 1 else "png"
                        sample[name] = b"not a picture" if number < broken else buffer.getvalue()
                tar.write(sample)
    return folder


@pytest.fixture(autouse=True)
def _ends_what_it_began() -> Iterator[None]:
    """A test that fails while its run goes on costs no other one."""
    yield
    end_left()


@pytest.fixture(scope="session")
def shards(tmp_path_factory) -> Path:
    return write_set(tmp_path_factory.mktemp("data") / "mixed", 80, 0.2)


@pytest.fixture(scope="session")
def text_shards(tmp_path_factory) -> Path:
    return write_set(tmp_path_factory.mktemp("data") / "text", 40, 1.0)


@pytest.fixture(scope="session")
def uneven_shards(tmp_path_factory) -> Path:
    """Up to three pictures a sample."""
    return write_set(tmp_path_factory.mktemp("data") / "uneven", 80, 0.3, most=3)


@pytest.fixture(scope="session")
def shaped_shards(tmp_path_factory) -> Path:
    """Pictures of several shapes, up to two a sample."""
    sizes = ((40, 30), (100, 30), (64, 64), (30, 90), (120, 80))
    return write_set(tmp_path_factory.mktemp("data") / "shapes", 80, 0.2, most=2, sizes=sizes)
