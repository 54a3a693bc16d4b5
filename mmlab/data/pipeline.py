"""The data source: from a plan to step manifests, packed text and pixels."""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch

from mmlab.data.decode import decode_into, open_rgb
from mmlab.data.format import (
    IMAGE_MARK,
    Turn,
    build,
    build_prompt,
    conversation_pieces,
    measure,
    parse_caption,
    parse_json,
    prompt_pieces,
    start_pieces,
)
from mmlab.data.index import Progress, open_indexes
from mmlab.data.lanes import LaneItem
from mmlab.data.manifest import ManifestSample, Split, StepManifest
from mmlab.data.mixture import mix
from mmlab.data.order import Order, Position
from mmlab.data.packed import IGNORE, PackedText, TextSequence, pack
from mmlab.data.remote import shown_name
from mmlab.data.resume import Resume
from mmlab.data.shards import ShardFiles
from mmlab.data.sources import find_sources, find_tokenizer
from mmlab.data.tiling import Grid, Picture, Tiling
from mmlab.data.tokenizer import TextTokenizer
from mmlab.data.windows import Buckets
from mmlab.errors import DataError
from mmlab.plan.schema import Plan


def normalised(tiles: np.ndarray, bad: Sequence[slice] = ()) -> torch.Tensor:
    """Decoded tiles, uint8 [N, 3, S, S], as float32 with mean 0.5 and standard deviation 0.5: -1..1 (SigLIP's); zeros
    where they are bad. In pinned memory where there is CUDA."""
    pixels = torch.empty(tiles.shape, dtype=torch.float32, pin_memory=torch.cuda.is_available())
    pixels.copy_(torch.from_numpy(tiles)).div_(127.5).sub_(1.0)
    for span in bad:
        pixels[span] = 0.0
    return pixels


def joined(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    """`torch.cat` of one or more contiguous tensors; without a copy where they lie behind one another in one buffer, as
    a batch's pixels do."""
    first, end = pieces[0], pieces[0].data_ptr()
    for piece in pieces:
        if piece.data_ptr() != end or piece.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat(list(pieces))
        end += piece.nbytes
    return first.as_strided((sum(map(len, pieces)), *first.shape[1:]), first.stride(), first.storage_offset())


class DataSource:
    """One split of the plan's data: opens shards, tokenizer and indexes (making what is made on first use).

    DataError, naming the file or the plan's field, when something is missing or does not fit the plan.
    """

    def __init__(
        self, plan: Plan, *, split: Literal["train", "held_out"] = "train", progress: Progress | None = None
    ) -> None:
        self.split = Split.of(plan)
        sources = find_sources(plan, split, progress)
        shards = [shard for source in sources for shard in source]
        self.tokenizer = TextTokenizer(find_tokenizer(plan, shards))
        self.image_size = plan.model.vision.image_size
        self.tokens_per_tile = plan.model.vision.tokens_per_tile
        self.tiling = Tiling.of(plan)
        self.seq_len = plan.data.seq_len
        self.global_batch = plan.data.global_batch
        self._check_vocabulary(plan)
        indexes = open_indexes(shards, self.tokenizer, progress)
        d, training = plan.data, split == "train"
        weights, share, window, buckets = (
            (d.weights, d.text_share, d.shuffle_window, d.bucket_window) if training else ((), 0.0, 0, 0)
        )
        mixture = mix(sources, indexes, weights, share)
        self.shards, self.indexes, self.kinds = mixture.shards, mixture.indexes, mixture.kinds
        self._several = len(sources) > 1
        self._check_length()
        sizes = [len(index) for index in self.indexes]
        self.order = Order(sizes, d.lanes, d.seed, mixture.counts, mixture.weights, window)
        self.buckets = Buckets(self.order, d.global_batch, buckets, self._sample)
        self._resume = Resume(plan, self.order)
        if training:
            self._check_budget()
        self.files = ShardFiles(self.shards)
        self.bad_reasons: OrderedDict[str, str] = OrderedDict()
        """Why the pictures of a sample (by key) could not be decoded; the latest 1,000."""
        self._reasons_lock = threading.Lock()

    def _check_vocabulary(self, plan: Plan) -> None:
        needed, has = self.tokenizer.vocab_size, plan.model.language.vocab_size
        if needed > has:
            tp = plan.parallel.tp
            raise DataError(
                f"model.language.vocab_size = {has}: the tokenizer {self.tokenizer.path} has {needed} tokens. "
                f"Set model.language.vocab_size={-(-needed // tp) * tp} or more."
            )

    def _check_length(self) -> None:
        if any(len(index.images) for index in self.indexes) and self.tokens_per_tile + 2 > self.seq_len:
            raise DataError(
                f"data.seq_len = {self.seq_len}: an image alone has {self.tokens_per_tile} tokens (patches of "
                f"model.vision.patch_size in model.vision.image_size). Set data.seq_len={self.tokens_per_tile + 64}."
            )

    def _check_budget(self) -> None:
        """DataError where a sample alone is over the token budget."""
        budget = self.split.budget
        if not budget or budget >= self.seq_len:
            return
        for shard, index in enumerate(self.indexes):
            for number in range(len(index)):
                length = self._sample(LaneItem(shard, number, 0, 0)).length
                if length > budget:
                    raise DataError(
                        f'data.token_budget = {budget}: sample "{index.keys[number]}" of '
                        f"{shown_name(self.shards[shard])} alone has {length} tokens. Set data.token_budget={length} "
                        f"or more, or data.seq_len={budget}."
                    )

    @property
    def vocab_size(self) -> int:
        """Tokens of the tokenizer; the plan's vocab_size may be larger."""
        return self.tokenizer.vocab_size

    @property
    def image_id(self) -> int:
        """The image placeholder's token."""
        return self.tokenizer.image_id

    @property
    def eos_id(self) -> int:
        """The token that ends an answer."""
        return self.tokenizer.eos_id

    def __len__(self) -> int:
        """Samples of one epoch."""
        return sum(len(index) for index in self.indexes)

    def identity(self) -> dict[str, Any]:
        """What the order of samples depends on, as JSON values: shards (paths), which kind of sample is read from each,
        the bucket window, and what `Order.identity` says."""
        shards = [str(path) for path in self.shards]
        told = {"shards": shards, "kinds": self.kinds, "bucket_window": self.buckets.window}
        return told | self.order.identity()

    # -- what a step consumes: no pixel and no text is read here

    def start(self) -> Position:
        """The position before step 1."""
        return self.order.start()

    def manifest(self, step: int, position: Position, split: Split | None = None) -> tuple[StepManifest, Position]:
        """What step `step` consumes from `position` on, and the position after it. Pure; alike on every rank.

        `split` divides the global batch (default: the plan's); it changes neither samples nor order. DataError when
        the position is of other lanes, sources or window.
        """
        batch, after = self.buckets.take(self._resume.enter(position))
        return StepManifest(step, batch.samples, split or self.split, batch.unbucketed), self._resume.leave(after)

    def _sample(self, item: LaneItem) -> ManifestSample:
        """An item of the order with its length and its tiles."""
        index, shard = self.indexes[item.shard], self.shards[item.shard]
        grids = self._grids(item.shard, item.index)
        length, targets, images = measure(index.segments_of(item.index), self._image_tokens(grids), self.seq_len)
        key = f"{shard if self._several else shard.name}/{index.keys[item.index]}"
        place = (key, item.shard, item.index, item.epoch, item.lane)
        return ManifestSample(*place, length, targets, grids[:images])

    def _grids(self, shard: int, sample: int) -> tuple[Grid, ...]:
        """How each image of a sample is tiled, of those too that seq_len cuts off."""
        index = self.indexes[shard]
        return self.tiling.grids(index.segments_of(sample), index.images_of(sample)[:, 2:].tolist())

    def _image_tokens(self, grids: Sequence[Grid]) -> list[int]:
        return [grid.tiles * self.tokens_per_tile for grid in grids]

    # -- text

    def turns(self, sample: ManifestSample) -> list[Turn]:
        """The sample's conversation, read from its shard."""
        index = self.indexes[sample.shard]
        is_json, offset, size = index.texts[sample.index].tolist()
        raw = self.files.read(sample.shard, offset, size)
        images = len(index.images_of(sample.index))
        where = f'{shown_name(self.shards[sample.shard])}: sample "{index.keys[sample.index]}"'
        parsed = parse_json(raw, images, where) if is_json else (parse_caption(raw.decode(), images, where), False)
        if parsed is None:
            raise DataError(f"{where}: changed since its index was made. Start the run again.")
        return parsed[0]

    def _sequence(self, sample: ManifestSample, masked: bool) -> TextSequence:
        pieces = conversation_pieces(self.turns(sample), self.tokenizer)
        tokens = self._image_tokens(self._grids(sample.shard, sample.index))
        sequence = build(pieces, self.image_id, tokens, self.seq_len)
        targets = (IGNORE,) * len(sequence.ids) if masked else sequence.targets
        return TextSequence(sequence.ids, targets, sample.key)

    def text(self, manifest: StepManifest, positions: Sequence[int], bad: Collection[int] = frozenset()) -> PackedText:
        """The packed text of the samples at `positions`, in that order; targets of `bad` positions are masked."""
        return pack([self._sequence(manifest.samples[i], i in bad) for i in positions], self.image_id)

    def prompted(self, sample: ManifestSample) -> ManifestSample:
        """A sample up to its first answer: with the images of its first prompt alone."""
        return replace(sample, grids=sample.grids[: self.turns(sample)[0].prompt.count(IMAGE_MARK)])

    def prompt(self, sample: ManifestSample) -> PackedText:
        """What generation continues: a `prompted` sample's text (T tokens, no targets)."""
        first = prompt_pieces(self.turns(sample)[0].prompt, self.tokenizer)
        tokens = self._image_tokens(sample.grids)
        sequence = build_prompt(start_pieces(self.tokenizer) + first, self.image_id, tokens)
        return pack([TextSequence(sequence.ids, sequence.targets, sample.key)], self.image_id)

    # -- pixels

    def pictures(self, sample: ManifestSample) -> list[Picture]:
        """Each picture that the sample, cut to seq_len, still has."""
        places = self.indexes[sample.shard].images_of(sample.index)[: len(sample.grids), :2].tolist()
        return [Picture(sample.shard, o, n, grid) for (o, n), grid in zip(places, sample.grids, strict=True)]

    def collect(
        self,
        manifest: StepManifest,
        pictures: Mapping[int, Sequence[Picture]],
        tiles: np.ndarray,
        reasons: Sequence[str],
    ) -> tuple[dict[int, torch.Tensor], set[int]]:
        """({position: pixels float32 [tiles, 3, S, S]}, positions with a bad picture) from the decoded `pictures` of
        some positions: uint8 [tiles, 3, S, S] of all of them and the reason of each, "" where it is not bad.

        The pixels lie behind one another in one buffer. Bad pictures are zeros and their reason is kept in
        `bad_reasons`.
        """
        bad: dict[int, str] = {}
        spans, places, first = [], {}, 0
        told = iter(reasons)
        for position, found in pictures.items():
            start = first
            for picture, reason in zip(found, told):  # noqa: B905 - the reasons are those of all positions
                if reason:
                    bad.setdefault(position, reason)
                    spans.append(slice(first, first + picture.grid.tiles))
                first += picture.grid.tiles
            places[position] = slice(start, first)
        for position, reason in bad.items():
            self._keep_reason(manifest.samples[position].key, reason)
        pixels = normalised(tiles, spans)
        return {position: pixels[place] for position, place in places.items()}, set(bad)

    def _keep_reason(self, key: str, reason: str) -> None:
        with self._reasons_lock:
            self.bad_reasons[key] = reason
            while len(self.bad_reasons) > 1000:
                self.bad_reasons.popitem(last=False)

    def decode_sample(self, sample: ManifestSample) -> tuple[torch.Tensor, bool]:
        """Read and decode one sample's pictures here and now: (float32 [tiles, 3, S, S], whether one is bad)."""
        pictures, first, bad = self.pictures(sample), 0, []
        side = self.image_size
        tiles = np.empty((sum(picture.grid.tiles for picture in pictures), 3, side, side), dtype=np.uint8)
        for picture in pictures:
            place = slice(first, first + picture.grid.tiles)
            data = self.files.read(picture.shard, picture.offset, picture.size)
            if reason := decode_into(tiles[place], data, picture.grid):
                self._keep_reason(sample.key, reason)
                bad.append(place)
            first = place.stop
        return normalised(tiles, bad), bool(bad)

    def pixels(self, manifest: StepManifest, positions: Sequence[int]) -> tuple[torch.Tensor, set[int]]:
        """(float32 [N, 3, S, S] of the samples at `positions` in that order, positions with a bad picture)."""
        tiles, bad = [torch.zeros(0, 3, self.image_size, self.image_size)], set()
        for position in positions:
            pixels, is_bad = self.decode_sample(manifest.samples[position])
            tiles.append(pixels)
            if is_bad:
                bad.add(position)
        return torch.cat(tiles), bad

    def item(self, sample: ManifestSample) -> dict[str, Any]:
        """A sample for a report: `image` (PNG bytes of its first picture as it is, RGB; None without one or when it
        cannot be decoded), `prompt` (without image marks), `truth` (the first answer)."""
        turn = self.turns(sample)[0]
        image: bytes | None = None
        for where in self.pictures(sample)[:1]:
            try:
                picture = open_rgb(self.files.read(where.shard, where.offset, where.size), least=(512, 512))
            except DataError:
                raise
            except Exception:  # an undecodable picture has no place in a report, its text has
                continue
            picture.thumbnail((512, 512))
            buffer = io.BytesIO()
            picture.save(buffer, format="PNG")
            image = buffer.getvalue()
        return {"image": image, "prompt": turn.prompt.replace("<image>", "").strip(), "truth": turn.answer}

    def close(self) -> None:
        """Close the shards."""
        self.files.close()
