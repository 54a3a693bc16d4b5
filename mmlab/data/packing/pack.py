"""The pack itself: records through processes to shards, in order; noted, gone on with, and reported."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import PIL

from mmlab.data.index import Progress
from mmlab.data.packing.options import PackOptions, Prepared, Record
from mmlab.data.packing.prepare import prepare
from mmlab.data.packing.shelf import Journal, Shard, Shelf, write_whole
from mmlab.data.packing.sources import Source, open_source
from mmlab.data.processes import Pool
from mmlab.data.tokenizer import TextTokenizer
from mmlab.data.write import DESCRIPTION
from mmlab.errors import DataError

MANIFEST = "manifest.json"
"""Written last: a pack is whole when it is there."""
REPORT = "report.json"
_SPLITS = ("train", "held_out")
_BATCH = 16
"""Records that go to a process at once."""
_NOTE_EVERY = 256
"""Records between two notes of the journal: at most so many are packed again after a kill."""
_FIRST = 100
"""Records before the share of skipped ones is judged (as the plan's data.max_bad_share does)."""


@dataclass
class Packed:
    """What a pack holds: `shards` in order, records `skipped` and `duplicates` (origin and reason of each, in order),
    `pictures` of which `copied` as they were; `resumed`: record that this call began with."""

    folder: Path
    shards: list[Shard] = field(default_factory=list)
    skipped: list[tuple[str, str]] = field(default_factory=list)
    duplicates: list[tuple[str, str]] = field(default_factory=list)
    pictures: int = 0
    copied: int = 0
    resumed: int = 0
    complete: bool = False

    def samples(self, split: str) -> int:
        """Samples of a split."""
        return sum(shard.samples for shard in self.shards if shard.split == split)


class _Pack:
    """One pack at work: its shelves, its journal and what was found so far."""

    def __init__(self, source: Source, out: Path, options: PackOptions, head: dict[str, Any]) -> None:
        self.source, self.out, self.options, self.head = source, out, options, head
        self.journal = Journal(out)
        most = options.samples_per_shard, options.shard_mb * 1e6
        self.shelves = {split: Shelf(out, split, *most) for split in _SPLITS}
        self.found = Packed(out)
        self.seen: dict[int, int] = {}
        """Digest to number of each sample: some 100 bytes a sample."""
        self.next = 0
        self._noted = [0, 0, 0]
        self._new: list[tuple[int, int]] = []

    def go_on(self) -> None:
        """Take up what the journal says is on the disk. DataError when it is of another source or other options."""
        lines = self.journal.read()
        if not lines:
            for path in self.out.glob(".*.part"):
                path.unlink()
            self.journal.note(self.head)
            return
        if lines[0] != self.head:
            raise DataError(
                f"{self.out}: holds an unfinished pack of {lines[0].get('source', {}).get('path')} with other options "
                "or other content. Give the command it was begun with, remove the folder, or name another."
            )
        for note in lines[1:]:
            self.found.shards += [Shard(**shard) for shard in note["shards"]]
            self.found.skipped += [(origin, why) for origin, why in note["skipped"]]
            self.found.duplicates += [(origin, why) for origin, why in note["duplicates"]]
            self.seen.update((digest, number) for digest, number in note["digests"])
        begin: dict[str, Any] = {"next": 0, "pictures": [0, 0], "at": {split: [0, 0, 0] for split in _SPLITS}}
        last = lines[-1] if len(lines) > 1 else begin
        self.next = self.found.resumed = last["next"]
        self.found.pictures, self.found.copied = last["pictures"]
        for split, shelf in self.shelves.items():
            shelf.go_on(*last["at"][split])
        self._noted = [len(self.found.shards), len(self.found.skipped), len(self.found.duplicates)]

    def note(self) -> None:
        """Note that all until here is on the disk."""
        for shelf in self.shelves.values():
            shelf.sync()
        shards, skipped, duplicates = self._noted
        found = self.found
        self.journal.note(
            {
                "next": self.next,
                "at": {split: shelf.at for split, shelf in self.shelves.items()},
                "pictures": [found.pictures, found.copied],
                "shards": [asdict(shard) for shard in found.shards[shards:]],
                "skipped": found.skipped[skipped:],
                "duplicates": found.duplicates[duplicates:],
                "digests": self._new,
            }
        )
        self._noted, self._new = [len(found.shards), len(found.skipped), len(found.duplicates)], []

    def take(self, sample: Prepared) -> bool:
        """Write a sample, or say why not; True when a shard was finished by it."""
        self.next = sample.number + 1
        if sample.problem:
            if self.options.strict:
                raise DataError(f"{sample.origin}: {sample.problem}. Correct it, or leave --strict out to skip it.")
            self.found.skipped.append((sample.origin, sample.problem))
            self._judge()
            return False
        if (first := self.seen.setdefault(sample.digest, sample.number)) != sample.number:
            self.found.duplicates.append((sample.origin, f"the same pictures and text as record {first + 1}"))
            return False
        self._new.append((sample.digest, sample.number))
        self.found.pictures += len(sample.members) - 1
        self.found.copied += sample.copied
        split = "held_out" if sample.side < self.options.held_out else "train"
        # Keys are numbers: names may hold dots (where WebDataset's key would end), collide, or be no UTF-8.
        finished = self.shelves[split].add(f"{sample.number:09d}", sample.members)
        if finished:
            self.found.shards.append(finished)
        return finished is not None

    def _judge(self) -> None:
        skipped, most = self.found.skipped, self.options.max_skipped
        if self.next >= _FIRST and len(skipped) > most * self.next:
            first = "; ".join(f"{origin}: {why}" for origin, why in skipped[:3])
            raise DataError(
                f"{len(skipped)} of the first {self.next} records cannot be packed, more than --max-skipped {most:g} "
                f"allows ({first}). Correct them, or allow more."
            )

    def finish(self, tokenizer: Path | None) -> None:
        """End the open shards and write what describes them, the manifest last."""
        for shelf in self.shelves.values():
            if finished := shelf.finish():
                self.found.shards.append(finished)
                self.note()
        found = self.found
        found.shards.sort(key=lambda shard: (shard.split != "train", shard.name))
        if not found.samples("train"):
            why = f" ({found.skipped[0][0]}: {found.skipped[0][1]})" if found.skipped else ""
            raise DataError(f"{self.source.path}: nothing to train on: no record made a sample{why}. Correct it.")
        if tokenizer:
            for path in (tokenizer, tokenizer.parent / "tokenizer_config.json"):
                if path.is_file():
                    name = "tokenizer.json" if path == tokenizer else path.name
                    write_whole(self.out / name, path.read_bytes())
        self._describe(bool(tokenizer))

    def _describe(self, tokenizer: bool) -> None:
        found = self.found
        counts = {split: found.samples(split) for split in _SPLITS if found.samples(split)}
        last = {split: sum(shard.split == split for shard in found.shards) - 1 for split in counts}
        patterns = {split: f"{split}-{{000000..{last[split]:06d}}}.tar" for split in counts}
        about = {"name": self.source.path.name, "version": "1", "source": str(self.source.path), "licence": "unknown"}
        described = {**about, "splits": patterns, "samples": counts}
        report = {
            "skipped": [{"origin": origin, "reason": why} for origin, why in found.skipped],
            "duplicates": [{"origin": origin, "reason": why} for origin, why in found.duplicates],
        }
        manifest = {
            **self.head,
            "samples": counts,
            "pictures": {"all": found.pictures, "copied": found.copied},
            "skipped": len(found.skipped),
            "duplicates": len(found.duplicates),
            "shards": [asdict(shard) for shard in found.shards],
        }
        if tokenizer:
            described["tokenizer"] = "tokenizer.json"
        for name, value in ((DESCRIPTION, described), (REPORT, report), (MANIFEST, manifest)):
            write_whole(self.out / name, json.dumps(value, indent=1).encode())
        self.journal.close()
        self.journal.path.unlink()

    def close(self) -> None:
        """Close all files; what is noted can be gone on with."""
        for shelf in self.shelves.values():
            shelf.close()
        self.journal.close()


def pack(
    source: Path,
    out: Path,
    options: PackOptions = PackOptions(),  # noqa: B008  # frozen
    tokenizer: Path | None = None,
    progress: Progress | None = None,
) -> Packed:
    """Pack a source into shards in the folder `out`, new, empty or with a pack of the same that was broken off.

    `tokenizer` is copied beside them. DataError with what is wrong: source, options, a full disk; after that and after
    a kill the same call goes on from the journal's last note.
    """
    _check(options)
    opened = open_source(source, options)
    if opened.format == "folder" and out.resolve().is_relative_to(source.resolve()):
        raise DataError(f"{out}: lies in the folder that is packed. Name a folder outside of {source}.")
    head = _head(opened, options, tokenizer)
    try:
        with _held(out):
            if finished := _finished(out, head):
                return finished
            work = _Pack(opened, out, options, head)
            try:
                _work(work, progress)
                work.finish(tokenizer)
            finally:
                work.close()
            return work.found
    except OSError as error:
        raise DataError(
            f"{out}: cannot be written ({error.strerror}). What is packed so far stays: make room, then give the same "
            "command again and it goes on."
        ) from None


def _check(options: PackOptions) -> None:
    if options.captions not in ("all", "first"):
        raise DataError(f"--captions {options.captions}: there is no such choice. Give all, or first.")
    if options.shard_mb < 0.01 or options.samples_per_shard < 1 or not 0 <= options.held_out < 1:
        raise DataError("--shard-mb is at least 0.01, --samples-per-shard at least 1, --held-out from 0 to below 1.")


def _work(work: _Pack, progress: Progress | None) -> None:
    work.go_on()

    def report(done: int, total: int) -> None:
        if progress:
            progress(done, total, f"{sum(shelf.samples for shelf in work.shelves.values()):,}")

    records = islice(work.source.records(report), work.next, None)
    since = 0
    with contextlib.closing(_prepared(records, work.source.images, work.options)) as samples:
        for sample in samples:
            since += 1
            if work.take(sample) or since >= _NOTE_EVERY:
                work.note()
                since = 0
    work.note()


def _head(source: Source, options: PackOptions, tokenizer: Path | None) -> dict[str, Any]:
    """What the packed bytes depend on."""
    named = {"path": str(source.path), "format": source.format, "images": str(source.images)}
    return {
        "format": 1,
        "source": {**named, "sha256": source.fingerprint},
        "options": options.in_the_bytes() | {"tokenizer": TextTokenizer(tokenizer).digest if tokenizer else ""},
        "pillow": PIL.__version__,
    }


@contextlib.contextmanager
def _held(out: Path) -> Iterator[None]:
    """Make the folder and hold it for this process alone."""
    out.mkdir(parents=True, exist_ok=True)
    handle = os.open(out, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise DataError(f"{out}: another process packs into it. Wait for it, or name another folder.") from None
    finally:
        os.close(handle)


def _finished(out: Path, head: dict[str, Any]) -> Packed | None:
    """The pack of the same that is whole already; None where there is work. DataError when `out` holds other things."""
    journal = Journal(out)
    try:
        manifest = json.loads((out / MANIFEST).read_bytes())
    except FileNotFoundError:
        if not journal.path.exists() and any(out.iterdir()):
            raise DataError(f"{out}: is not empty, and no pack of it was begun. Name a new folder.") from None
        return None
    except ValueError:
        raise DataError(f"{out / MANIFEST}: cannot be read. Remove the folder, or name another.") from None
    if not isinstance(manifest, dict) or {key: manifest.get(key) for key in head} != head:
        raise DataError(f"{out}: holds a finished pack of another source or with other options. Name another folder.")
    journal.path.unlink(missing_ok=True)
    report = json.loads((out / REPORT).read_bytes())
    skipped, duplicates = ([(row["origin"], row["reason"]) for row in report[key]] for key in ("skipped", "duplicates"))
    pictures = manifest["pictures"]
    shards = [Shard(**shard) for shard in manifest["shards"]]
    return Packed(out, shards, skipped, duplicates, pictures["all"], pictures["copied"], complete=True)


def _prepared(records: Iterator[Record], images: Path, options: PackOptions) -> Generator[Prepared, None, None]:
    """Records prepared in this process or in `workers` others, in their order."""
    batches = iter(lambda: list(islice(records, _BATCH)), [])
    if not options.workers:
        for batch in batches:
            yield from prepare(batch, images, options)
        return
    with Pool(options.workers) as pool:
        waiting: deque[Future[list[Prepared]]] = deque()
        try:
            for batch in batches:
                waiting.append(pool.submit(prepare, batch, images, options))
                if len(waiting) > 4 * options.workers:
                    yield from waiting.popleft().result()
            while waiting:
                yield from waiting.popleft().result()
        except BrokenProcessPool:
            raise DataError(
                "A process that reads pictures ended abruptly (out of memory?). Use fewer --workers."
            ) from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
