"""The index of a shard: where each sample lies, how large its images are and how long its text is.

Made on first use and stored beside the shard (or in the cache when its folder cannot be written), it lets every rank
compute what a step consumes without reading pixels. It depends on the shard's content and on the tokenizer.
"""

from __future__ import annotations

import io
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from mmlab.data.cache import exclusive, place_beside, write_beside
from mmlab.data.decode import on_its_side
from mmlab.data.format import Turn, conversation_pieces, parse_caption, parse_json, to_segments
from mmlab.data.remote import shown_name
from mmlab.data.shards import Member, ScannedSample, ShardFiles, scan_shard
from mmlab.data.tokenizer import TextTokenizer
from mmlab.errors import DataError

VERSION = 2
"""Changes when the format of the index or of conversations changes: old indexes are then made anew."""
Progress = Callable[[int, int, str], None]
"""Called with (done, total, what)."""


@dataclass(frozen=True)
class ShardIndex:
    """One shard. n samples, m images; arrays are int64.

    `keys` n names; `texts` [n, 3]: kind (0 txt, 1 json), byte offset, bytes; `images` [m, 4]: byte offset, bytes,
    width, height in pixels as it is shown (0 where the header cannot be read); `image_first` [n+1] and
    `segment_first` [n+1] say which images and segments belong to a sample; `segments`: +n prompt tokens, -n target
    tokens, 0 an image.
    """

    keys: tuple[str, ...]
    texts: np.ndarray
    images: np.ndarray
    image_first: np.ndarray
    segments: np.ndarray
    segment_first: np.ndarray

    def __len__(self) -> int:
        return len(self.keys)

    def images_of(self, sample: int) -> np.ndarray:
        """[k, 4]: the sample's images."""
        return self.images[self.image_first[sample] : self.image_first[sample + 1]]

    def segments_of(self, sample: int) -> list[int]:
        """The sample's lengths, piece by piece."""
        return self.segments[self.segment_first[sample] : self.segment_first[sample + 1]].tolist()

    def select(self, wanted: np.ndarray) -> ShardIndex:
        """The index of some of the samples alone (bool [n]), in their order."""
        chosen = np.flatnonzero(wanted)
        images, image_first = _runs(self.image_first, chosen)
        segments, segment_first = _runs(self.segment_first, chosen)
        keys = tuple(self.keys[sample] for sample in chosen.tolist())
        return ShardIndex(
            keys, self.texts[chosen], self.images[images], image_first, self.segments[segments], segment_first
        )


def _runs(first: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(indices of the entries of the chosen samples, where each of them begins among these) of a list of lists."""
    lengths = np.diff(first)[chosen]
    begins = np.concatenate([[0], np.cumsum(lengths)])
    entries = np.arange(begins[-1]) + np.repeat(first[:-1][chosen] - begins[:-1], lengths)
    return entries.astype(np.int64), begins.astype(np.int64)


def read_turns(read: Callable[[Member], bytes], sample: ScannedSample, where: str) -> tuple[list[Turn], str]:
    """A sample's conversation and which member ("txt" or "json") it came from. DataError without any text.

    A json with a conversation goes before a txt, a txt before a json with a caption (img2dataset writes both).
    """
    images = len(sample.images)
    from_json = parse_json(read(sample.texts["json"]), images, where) if "json" in sample.texts else None
    if "txt" in sample.texts and not (from_json and from_json[1]):
        raw = read(sample.texts["txt"])
        try:
            return parse_caption(raw.decode(), images, where), "txt"
        except UnicodeDecodeError:
            raise DataError(f"{where}: its txt is not UTF-8. Save it as UTF-8.") from None
    if from_json is None:
        raise DataError(
            f"{where}: no caption. Add a txt, or a json with `conversations`, `caption` or `text`, under the same key."
        )
    return from_json[0], "json"


def image_size(read: Callable[[int, int], bytes], member: Member) -> tuple[int, int]:
    """(width, height) in pixels from the header alone, as EXIF says that it is shown; (0, 0) when it cannot be read.

    `read(offset, size)`; the first 64 KB are enough unless metadata stand before the size. A PNG's EXIF counts where
    it stands before the pixels: to look behind them is to decode them.
    """
    for size in (min(member.size, 1 << 16), member.size):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # decompression-bomb warnings: nothing is decompressed here
                with Image.open(io.BytesIO(read(member.offset, size))) as image:
                    sideways = (image.format != "PNG" or "exif" in image.info) and on_its_side(image)
                    return image.size[::-1] if sideways else image.size
        except DataError:
            raise
        except Exception:  # Pillow's decoders raise all kinds on damaged files
            if size == member.size:
                break
    return 0, 0


def build_index(path: Path, tokenizer: TextTokenizer) -> ShardIndex:
    """Scan a shard. DataError naming shard and sample on a damaged shard or a sample without text."""
    samples = scan_shard(path)
    files = ShardFiles([path])
    texts, images, image_first, segments, segment_first = [], [], [0], [], [0]
    try:
        for sample in samples:
            where = f'{shown_name(path)}: sample "{sample.key}"'
            turns, kind = read_turns(lambda m: files.read(0, m.offset, m.size), sample, where)
            member = sample.texts[kind]
            texts.append((int(kind == "json"), member.offset, member.size))
            for image in sample.images:
                images.append((image.offset, image.size, *image_size(lambda o, s: files.read(0, o, s), image)))
            image_first.append(len(images))
            segments += to_segments(conversation_pieces(turns, tokenizer))
            segment_first.append(len(segments))
    finally:
        files.close()
    return ShardIndex(
        keys=tuple(sample.key for sample in samples),
        texts=np.array(texts, dtype=np.int64).reshape(-1, 3),
        images=np.array(images, dtype=np.int64).reshape(-1, 4),
        image_first=np.array(image_first, dtype=np.int64),
        segments=np.array(segments, dtype=np.int64),
        segment_first=np.array(segment_first, dtype=np.int64),
    )


def _fingerprint(path: Path) -> list[int]:
    """What tells that a shard is the one that was indexed: version, bytes, time of last change in ns."""
    stat = path.stat()
    return [VERSION, stat.st_size, stat.st_mtime_ns]


def _to_bytes(index: ShardIndex, fingerprint: list[int]) -> bytes:
    buffer = io.BytesIO()
    keys = np.frombuffer(json.dumps(index.keys).encode(), dtype=np.uint8)
    arrays = {name: getattr(index, name) for name in ("texts", "images", "image_first", "segments", "segment_first")}
    np.savez_compressed(buffer, fingerprint=np.array(fingerprint, dtype=np.int64), keys=keys, **arrays)
    return buffer.getvalue()


def _load(path: Path, fingerprint: list[int]) -> ShardIndex | None:
    """The stored index; None when there is none, it is of another version of the shard, or damaged."""
    try:
        with np.load(path, allow_pickle=False) as data:
            if data["fingerprint"].tolist() != fingerprint:
                return None
            arrays = {name: data[name] for name in data.files if name not in ("fingerprint", "keys")}
            return ShardIndex(keys=tuple(json.loads(data["keys"].tobytes())), **arrays)
    except Exception:  # a damaged zip raises several kinds; the index can always be made again
        return None


def open_index(path: Path, tokenizer: TextTokenizer) -> ShardIndex:
    """The index of a shard, made and stored if need be. Safe when several processes ask at once."""
    try:
        fingerprint = _fingerprint(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}).") from None
    places = place_beside(path, f"{path.name}.{tokenizer.digest}.index.npz")
    for place in places:
        if (index := _load(place, fingerprint)) is not None:
            return index
    with exclusive(places[0]):
        for place in places:  # another process may have made it while this one waited
            if (index := _load(place, fingerprint)) is not None:
                return index
        index = build_index(path, tokenizer)
        write_beside(places, _to_bytes(index, fingerprint))
        return index


def open_indexes(paths: Sequence[Path], tokenizer: TextTokenizer, progress: Progress | None = None) -> list[ShardIndex]:
    """The index of each shard, in order."""
    indexes = []
    for done, path in enumerate(paths):
        if progress:
            progress(done, len(paths), f"index of {path.name}")
        indexes.append(open_index(path, tokenizer))
    return indexes
