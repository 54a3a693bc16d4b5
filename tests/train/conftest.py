"""Small shards of drawn pictures, with and without text-only samples, and a run that a test can steer."""

import io
import random
from pathlib import Path

import pytest
import webdataset as wds
from PIL import Image

WORDS = ["red", "green", "blue", "square", "circle", "big", "small", "left", "right", "top", "bottom"]


def write_set(folder: Path, samples: int, text_share: float, broken: int = 0) -> Path:
    """`samples` samples in two shards; about `text_share` without a picture; the first `broken` undecodable."""
    folder.mkdir(parents=True)
    random_ = random.Random(7)
    for shard in range(2):
        with wds.TarWriter(str(folder / f"train-{shard:06d}.tar")) as tar:
            for i in range(samples // 2):
                number = shard * (samples // 2) + i
                sample = {"__key__": f"s{number:05d}", "txt": " ".join(random_.choices(WORDS, k=random_.randint(2, 9)))}
                if random_.random() >= text_share:
                    picture, buffer = Image.new("RGB", (40, 30), tuple(random_.choices(range(256), k=3))), io.BytesIO()
                    picture.save(buffer, "PNG")
                    sample["png"] = b"not a picture" if number < broken else buffer.getvalue()
                tar.write(sample)
    return folder


@pytest.fixture(scope="session")
def shards(tmp_path_factory) -> Path:
    return write_set(tmp_path_factory.mktemp("data") / "mixed", 80, 0.2)


@pytest.fixture(scope="session")
def text_shards(tmp_path_factory) -> Path:
    return write_set(tmp_path_factory.mktemp("data") / "text", 40, 1.0)
