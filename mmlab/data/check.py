"""`mmlab data check`: are shards whole, is every member readable, does every picture decode."""

from __future__ import annotations

import hashlib
import io
import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image

from mmlab.data.index import Progress, image_size, read_turns
from mmlab.data.packing.pack import MANIFEST
from mmlab.data.processes import Pool
from mmlab.data.remote import beside, is_address, is_remote, shown_name
from mmlab.data.shards import Member, ScannedSample, ShardFiles, open_shard, scan_shard
from mmlab.data.sources import shards_of_set
from mmlab.errors import DataError


@dataclass(frozen=True)
class Bad:
    """What is wrong where: a shard, in it the sample's `key` and the `member`'s extension (empty: the shard itself)."""

    shard: str
    key: str
    member: str
    reason: str

    def __str__(self) -> str:
        return f"{self.shard}: {f'{self.key}.{self.member}: ' if self.key else ''}{self.reason}"


@dataclass
class Checked:
    """What was looked at and what was found. `manifest`: shards that a manifest gave a checksum for."""

    shards: int = 0
    samples: int = 0
    pictures: int = 0
    bytes: int = 0
    manifest: int = 0
    bad: list[Bad] = field(default_factory=list)


def check(pattern: str, *, quick: bool = False, workers: int = 0, progress: Progress | None = None) -> Checked:
    """Check the shards that `pattern` names as data.path would (of a packed folder: all splits).

    `quick` reads headers only: no checksums, no decoding. `workers`: processes, a shard each; 0 is this one. What is
    wrong is in `bad`; DataError only when there are no such shards.
    """
    shards = shards_of_set(pattern, progress)
    expected, missing = _expected(shards, whole=is_folder(pattern))
    found = Checked(len(shards), bad=[Bad(name, "", "", "is in the manifest but not there") for name in missing])
    jobs = [partial(check_shard, path, expected.get(path), quick) for path in shards]
    for done, one in enumerate(_done(jobs, workers)):
        if progress:
            progress(done + 1, len(shards), shards[done].name)
        found.samples += one.samples
        found.pictures += one.pictures
        found.bytes += one.bytes
        found.manifest += one.manifest
        found.bad += one.bad
    return found


def is_folder(pattern: str) -> bool:
    """Whether a pattern names all shards of a place, so that one which is missing from it is missed."""
    return Path(pattern).is_dir() or (is_remote(pattern) and not pattern.partition("?")[0].endswith(".tar"))


def _done(jobs: Sequence[Callable[[], Checked]], workers: int) -> Iterator[Checked]:
    if not workers:
        yield from (job() for job in jobs)
        return
    with Pool(min(workers, len(jobs))) as pool:
        try:
            futures = [pool.submit(job) for job in jobs]
            yield from (future.result() for future in futures)
        except BrokenProcessPool:
            raise DataError("A process that checks ended abruptly (out of memory?). Use fewer --workers.") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _expected(shards: Sequence[Path], whole: bool) -> tuple[dict[Path, dict[str, Any]], list[str]]:
    """(what the manifests beside the shards say of each, names they have that are not there)."""
    said: dict[Path, dict[str, Any]] = {}
    missing: list[str] = []
    for folder in dict.fromkeys(path.parent for path in shards):
        inside = {path.name: path for path in shards if path.parent == folder}
        first = next(iter(inside.values()))
        file = beside(first, MANIFEST) if is_address(first) else folder / MANIFEST
        for entry in _entries(file) if file else ():
            if entry["name"] in inside:
                said[inside[entry["name"]]] = entry
            elif whole:
                missing.append(entry["name"])
    return said, missing


def _entries(file: Path) -> list[dict[str, Any]]:
    """The shards of a manifest that `mmlab data pack` wrote; none where there is none or it is of another kind."""
    try:
        entries = json.loads(file.read_bytes())["shards"]
        return [entry for entry in entries if {"name", "bytes", "samples", "sha256"} <= entry.keys()]
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: cannot be read ({error}). Pack again, or remove it.") from None
    except (KeyError, TypeError, AttributeError):
        return []


def check_shard(path: Path, expected: dict[str, Any] | None, quick: bool) -> Checked:
    """One shard against what the manifest says of it, if that says anything."""
    found, name = Checked(manifest=expected is not None), shown_name(path)
    try:
        with open_shard(path) as file:
            digest = "" if quick or not expected else hashlib.file_digest(file, "sha256").hexdigest()
            found.bytes = file.seek(0, io.SEEK_END)
        samples = scan_shard(path)
    except OSError as error:
        found.bad.append(Bad(name, "", "", f"cannot be read ({error.strerror})"))
        return found
    except DataError as error:
        found.bad.append(Bad(name, "", "", str(error).removeprefix(f"{name}: ")))
        return found
    if expected and (found.bytes, len(samples)) != (expected["bytes"], expected["samples"]):
        told = f"{expected['bytes']} bytes and {expected['samples']} samples"
        found.bad.append(Bad(name, "", "", f"has {found.bytes} bytes and {len(samples)} samples, not {told}"))
    elif expected and digest and digest != expected["sha256"]:
        found.bad.append(Bad(name, "", "", "its SHA-256 is not the manifest's: it was changed or damaged"))
    files = ShardFiles([path])
    try:
        for sample in samples:
            found.samples += 1
            found.pictures += len(sample.images)
            found.bad += [Bad(name, sample.key, *what) for what in _bad_members(files, sample, quick)]
    except DataError as error:  # the shard cannot be read on: a disk or a server failed
        found.bad.append(Bad(name, "", "", str(error).removeprefix(f"{name}: ")))
    finally:
        files.close()
    return found


def _bad_members(files: ShardFiles, sample: ScannedSample, quick: bool) -> Iterator[tuple[str, str]]:
    """(member, reason) of what training would refuse (a text) or mask (a picture)."""

    def read(member: Member) -> bytes:
        return files.read(0, member.offset, member.size)

    contents = {kind: read(member) for kind, member in sample.texts.items()}
    try:
        read_turns(lambda member: contents[member.extension.rpartition(".")[2]], sample, "")
    except DataError as error:
        yield "/".join(contents) or "txt", str(error).removeprefix(": ")
    for member in sample.images:
        if quick:
            if image_size(lambda offset, size: files.read(0, offset, size), member) == (0, 0):
                yield member.extension, "its header is of no picture"
        elif reason := undecodable(read(member)):
            yield member.extension, reason


def undecodable(data: bytes) -> str:
    """Why a picture cannot be decoded to its end; empty when it can."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # large pictures and odd metadata are no reason to speak up
            with Image.open(io.BytesIO(data)) as image:
                image.draft(None, (1, 1))  # an eighth of the size: all bytes are read all the same
                image.load()
        return ""
    except Exception as error:  # decoders raise all kinds on damaged bytes
        return f"cannot be decoded ({type(error).__name__}: {error})".splitlines()[0][:200]
