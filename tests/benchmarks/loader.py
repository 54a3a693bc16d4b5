"""Images a second of this loader against others, from the same photos to the same batches: float32 [N, 3, 224, 224].

- ours: the trainer's own feed, from a shard, with `--workers` decode processes (0: a thread)
- webdataset: WebDataset(...).decode("pil").to_tuple(...).map_tuple(...), as its documentation shows it, in a DataLoader
- files: a torch Dataset that opens files with Pillow, in a DataLoader
- dali: DALI's CPU pipeline over files (readers.file, decoders.image, resize, crop_mirror_normalize), on as many threads
- packed: ours, from photos that were resized to the target when the shard was made
- bare: decoding alone as ours does it, from bytes in memory to uint8, in as many processes as there are workers

Photos are those of a folder, cut to each size's shape; larger ones are reduced to it, none is enlarged much. Each round
times every side in turn, each kept alive and run warm before; ratios are medians over the rounds. Beside images a
second by the clock stands the processor time of an image, of all processes together, which neighbours disturb less.

    python tests/benchmarks/loader.py --photos FOLDER [--sizes 500x375 2000x1500 4000x3000] [--workers 1 2] [--json F]
"""

from __future__ import annotations

import argparse
import functools
import io
import multiprocessing
import statistics
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import bench_report

TARGET = 224
TICK = 0.01
"""Seconds in which the system counts processor time."""
AHEAD = 2
"""Batches that every loader holds ready: DataLoader's default for each worker, and ours."""


# -- the photos


def photos(folder: Path, width: int, height: int, most: int) -> list[bytes]:
    """JPEG of `width` x `height` from the folder's photos of about that size or more, quality 90."""
    from PIL import Image, ImageOps

    found = []
    for path in sorted(p for p in folder.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg", ".png")):
        with Image.open(path) as image:
            if image.width * image.height < 0.85 * width * height or len(found) == most:
                continue
            fitted = ImageOps.fit(image.convert("RGB"), (width, height), Image.Resampling.LANCZOS)
        found.append(_jpeg(fitted))
    if not found:
        raise SystemExit(f"{folder}: no photo of {width}x{height} or more")
    return found


def _jpeg(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def resized(pictures: list[bytes]) -> list[bytes]:
    """The same photos as a pack made for the target has them."""
    from PIL import Image

    size = (TARGET, TARGET)
    return [_jpeg(Image.open(io.BytesIO(data)).resize(size, Image.Resampling.BICUBIC)) for data in pictures]


def write_shard(folder: Path, pictures: list[bytes], copies: int) -> None:
    """A shard of the pictures with captions, several times over, so that an epoch is more than a few batches."""
    folder.mkdir(parents=True)
    with tarfile.open(folder / "train-000000.tar", "w") as tar:
        for number, data in enumerate(pictures * copies):
            for end, content in (("jpg", data), ("txt", b"a photo")):
                info = tarfile.TarInfo(f"{number:06d}.{end}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))


def write_files(folder: Path, pictures: list[bytes], copies: int) -> None:
    """The pictures as files of one class."""
    (folder / "class").mkdir(parents=True)
    for number, data in enumerate(pictures * copies):
        (folder / "class" / f"{number:06d}.jpg").write_bytes(data)


# -- the sides: endless batches


def ours(folder: Path, workers: int, batch: int) -> Iterator[Any]:
    """The feed of a rank that encodes."""
    from types import SimpleNamespace

    from mmlab.data.pipeline import DataSource, joined
    from mmlab.plan import Plan
    from mmlab.train.feed import Feed

    plan = Plan.preset("laptop").with_(
        {
            "data.path": str(folder), "data.global_batch": batch, "data.workers": workers, "data.prefetch": AHEAD,
            "data.seq_len": 512, "model.vision.image_size": TARGET, "model.vision.patch_size": 16,
            "model.language.vocab_size": 1024, "model.language.max_positions": 512,
        }
    )  # fmt: skip
    source = DataSource(plan)
    mesh: Any = SimpleNamespace(place=SimpleNamespace(vision=0, role="vision"), control=None)
    feed = Feed(plan, mesh, source)
    feed.reset(feed.cursors, 0)
    try:
        while True:
            pixels = feed.batch().pixels
            feed.agree(feed.next_bad())
            yield joined(list(pixels.values()))
    finally:
        feed.close()
        source.close()


def transform(image: Any) -> Any:
    """What torchvision's Resize, ToTensor and Normalize(0.5, 0.5) do to a PIL image."""
    import numpy as np
    import torch
    from PIL import Image

    small = image.convert("RGB").resize((TARGET, TARGET), Image.Resampling.BICUBIC)
    return torch.from_numpy(np.array(small)).permute(2, 0, 1).contiguous().float().div(255).sub_(0.5).div_(0.5)


def _loaded(dataset: Any, workers: int, batch: int, **more: Any) -> Iterator[Any]:
    """Batches of a torch DataLoader, for ever."""
    from torch.utils.data import DataLoader

    ahead = {"prefetch_factor": AHEAD, "persistent_workers": True} if workers else {}
    loader = DataLoader(dataset, batch_size=batch, num_workers=workers, drop_last=True, **ahead, **more)
    while True:
        for images, _ in loader:
            yield images


def caption(text: str) -> str:
    """A caption as it is (a function, so that worker processes can be given it)."""
    return text


def webdataset(folder: Path, workers: int, batch: int) -> Iterator[Any]:
    """A pipeline as WebDataset's documentation writes it."""
    import webdataset as wds

    shards = [str(path) for path in sorted(folder.glob("*.tar"))] * max(1, workers)  # one for each worker at least
    dataset = wds.WebDataset(shards, shardshuffle=False).decode("pil").to_tuple("jpg", "txt")
    yield from _loaded(dataset.map_tuple(transform, caption).repeat(), workers, batch)


class Files:
    """A torch Dataset over files."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.rglob("*.jpg"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> tuple[Any, int]:
        from PIL import Image

        with Image.open(self.paths[number]) as image:
            return transform(image), 0


def files(folder: Path, workers: int, batch: int) -> Iterator[Any]:
    """A torch DataLoader over files."""
    yield from _loaded(Files(folder), workers, batch, shuffle=True)


def dali(folder: Path, workers: int, batch: int) -> Iterator[Any]:
    """DALI's CPU pipeline."""
    import torch
    from nvidia.dali import Pipeline, fn, types

    pipeline = Pipeline(batch, max(1, workers), device_id=None, prefetch_queue_depth=AHEAD)
    with pipeline:
        encoded, _ = fn.readers.file(file_root=str(folder), random_shuffle=True)
        images = fn.decoders.image(encoded, device="cpu", output_type=types.RGB)
        small = fn.resize(images, size=[TARGET, TARGET], interp_type=types.INTERP_CUBIC, antialias=True)
        middle = [127.5] * 3
        pipeline.set_outputs(fn.crop_mirror_normalize(small, mean=middle, std=middle, output_layout="CHW"))
    pipeline.build()
    while True:
        yield torch.from_numpy(pipeline.run()[0].as_array())


def processor_seconds() -> float:
    """What this process and all below it have used so far."""
    import psutil

    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return sum(t.user + t.system for t in times)


@dataclass
class Turn:
    """One turn of a side: images a second by the clock, and processor seconds of an image."""

    rate: float
    used: float


def _timed(work: Callable[[], object], count: int) -> Turn:
    """A turn in which `work` gives that many images."""
    used, began = processor_seconds(), time.perf_counter()
    work()
    seconds = time.perf_counter() - began
    return Turn(count / seconds, max(TICK, processor_seconds() - used) / count)


def _decode_all(pictures: list[bytes], count: int) -> None:
    """Decode that many pictures."""
    from mmlab.data.decode import decode

    for number in range(count):
        decode(pictures[number % len(pictures)], TARGET)


class Bare:
    """Decoding alone, in processes of its own."""

    def __init__(self, pictures: list[bytes], workers: int) -> None:
        self.pictures, self.workers = pictures, max(1, workers)
        self.pool = ProcessPoolExecutor(self.workers, multiprocessing.get_context("spawn"))

    def turn(self, count: int) -> Turn:
        """Decode about so many images, equally many in every process."""
        each = -(-count // self.workers)

        def work() -> None:
            jobs = [self.pool.submit(_decode_all, self.pictures, each) for _ in range(self.workers)]
            for job in jobs:
                job.result()

        return _timed(work, each * self.workers)

    def close(self) -> None:
        """End the processes."""
        self.pool.shutdown()


class Loader:
    """A side that yields batches, kept alive between its turns."""

    def __init__(self, batches: Iterator[Any], batch: int) -> None:
        self.batches, self.batch = batches, batch

    def turn(self, count: int) -> Turn:
        """Take about so many images, once what lay ready is used up."""
        for _ in range(AHEAD + 2):
            images = next(self.batches)
        if tuple(images.shape) != (self.batch, 3, TARGET, TARGET):
            raise AssertionError(f"a batch of {tuple(images.shape)}")
        wanted = -(-count // self.batch)

        def work() -> None:
            for _ in range(wanted):
                next(self.batches)

        return _timed(work, wanted * self.batch)

    def close(self) -> None:
        """End its workers."""
        if hasattr(self.batches, "close"):
            self.batches.close()


# -- measuring


def make_sides(folder: Path, pictures: list[bytes], workers: int, batch: int) -> dict[str, Any]:
    """Each side by name; one whose library is missing is left out and said to be."""
    copies = max(1, -(-4 * batch // len(pictures)))
    write_shard(folder / "shards", pictures, copies)
    write_shard(folder / "packed", resized(pictures), copies)
    write_files(folder / "files", pictures, copies)
    makers: dict[str, tuple[Callable[[Path, int, int], Iterator[Any]], str]] = {
        "webdataset": (webdataset, "shards"), "ours": (ours, "shards"), "packed": (ours, "packed"),
        "files": (files, "files"), "dali": (dali, "files"),
    }  # fmt: skip
    sides: dict[str, Any] = {"bare": Bare(pictures, workers)}
    for name, (make, where) in makers.items():
        try:
            side = Loader(make(folder / where, workers, batch), batch)
            side.turn(batch)  # starts its workers; a library that is missing is noticed here
            sides[name] = side
        except ImportError as error:
            print(f"{name}: left out, {error}")
    return sides


def measure(pictures: list[bytes], workers: int, rounds: int, count: int, batch: int) -> dict[str, list[Turn]]:
    """{side: its turn in each round}; the side that goes first changes."""
    with tempfile.TemporaryDirectory() as folder:
        sides = make_sides(Path(folder), pictures, workers, batch)
        found: dict[str, list[Turn]] = {name: [] for name in sides}
        try:
            for number in range(rounds):
                order = list(sides)[number % len(sides) :] + list(sides)[: number % len(sides)]
                for name in order:
                    turn = sides[name].turn(count)
                    found[name].append(turn)
                    time.sleep(AHEAD * batch * (workers or 1) / turn.rate)  # until it has filled its queue again
        finally:
            for side in sides.values():
                side.close()
    return found


def against(found: dict[str, list[Turn]], side: str, other: str) -> dict[str, float]:
    """How many times as fast one side is as another, by the clock and by processor time: medians over the rounds.
    Empty where one is missing."""
    if side not in found or other not in found:
        return {}
    both = list(zip(found[side], found[other], strict=True))
    clock, used = [a.rate / b.rate for a, b in both], [b.used / a.used for a, b in both]
    return {"clock": statistics.median(clock), "used": statistics.median(used)}


def rows_of(size: str, workers: int, found: dict[str, list[Turn]]) -> list[dict[str, Any]]:
    """A row for each side."""
    return [
        {
            "size": size, "workers": workers, "side": name,
            "images_per_s": statistics.median(turn.rate for turn in turns),
            "processor_ms": statistics.median(1e3 * turn.used for turn in turns),
            "to_webdataset": against(found, name, "webdataset"), "to_bare": against(found, name, "bare"),
        }
        for name, turns in found.items()
    ]  # fmt: skip


def show(rows: list[dict[str, Any]]) -> str:
    """The rows as a table; of each ratio the clock's, then the processor's."""
    form = "{:>10} {:>7} {:>11} {:>9} {:>8} {:>14} {:>12}"
    lines = [form.format("size", "workers", "side", "images/s", "cpu ms", "x webdataset", "x bare")]
    for row in rows:
        ratios = [" ".join(f"{value:.2f}" for value in row[key].values()) for key in ("to_webdataset", "to_bare")]
        rates = (f"{row['images_per_s']:.1f}", f"{row['processor_ms']:.2f}")
        lines.append(form.format(row["size"], row["workers"], row["side"], *rates, *ratios))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    """Measure and print; with --json also write."""
    parser = bench_report.parser(__doc__)
    parser.add_argument("--photos", type=Path, required=True, help="a folder of photos")
    parser.add_argument("--sizes", nargs="+", default=["500x375", "2000x1500", "4000x3000"])
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=1.0, help="about how long ours decodes in a turn")
    parser.add_argument("--most", type=int, default=24, help="photos at most")
    args: argparse.Namespace = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for size in args.sizes:
        width, _, height = size.partition("x")
        pictures = photos(args.photos, int(width), int(height), args.most)
        each = 1 / _timed(functools.partial(_decode_all, pictures, len(pictures)), len(pictures)).rate
        for workers in args.workers:
            count = max(args.batch, int(args.seconds * max(1, workers) / each))
            rows += rows_of(size, workers, measure(pictures, workers, args.rounds, count, args.batch))
            print(show([row for row in rows if row["size"] == size and row["workers"] == workers]), flush=True)
    print(bench_report.machine())
    print(show(rows))
    bench_report.keep(rows, args.json)


if __name__ == "__main__":
    main()
