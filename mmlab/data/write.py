"""Writing a data set: shards through the WebDataset library, a tokenizer beside them, and what the set is."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmlab.data.index import Progress
from mmlab.data.tokenizer import train_tokenizer

DESCRIPTION = "dataset.json"
"""The file that says what a set is and which shards belong to which split."""
SAMPLES_PER_SHARD = 1024


@dataclass(frozen=True)
class NewSample:
    """A sample to write: unique `key`, bytes of its picture (None: text only), its `extension`, and its json."""

    key: str
    image: bytes | None
    json: Mapping[str, Any]
    extension: str = "png"


def conversation(turns: Sequence[tuple[str, str]]) -> list[dict[str, str]]:
    """Prompt and answer pairs as LLaVA writes them, the image mark in the first prompt."""
    result = []
    for number, (prompt, answer) in enumerate(turns):
        result.append({"from": "human", "value": f"<image>\n{prompt}" if number == 0 else prompt})
        result.append({"from": "gpt", "value": answer})
    return result


def write_shards(folder: Path, split: str, samples: Iterable[NewSample]) -> tuple[str, int]:
    """Write `<split>-NNNNNN.tar`; returns the pattern of the shards (relative to the folder) and how many samples."""
    from webdataset import ShardWriter  # costs over a second to import: only when shards are written

    count = 0
    # A fixed time and owner in the tar make the same samples the same bytes.
    options = {"maxcount": SAMPLES_PER_SHARD, "maxsize": 1e9, "verbose": 0, "mtime": 0.0, "user": "", "group": ""}
    with ShardWriter(str(folder / f"{split}-%06d.tar"), **options) as writer:
        for sample in samples:
            text = json.dumps(sample.json, ensure_ascii=False).encode()
            picture = {} if sample.image is None else {sample.extension: sample.image}
            writer.write({"__key__": sample.key, **picture, "json": text})
            count += 1
    last = (count - 1) // SAMPLES_PER_SHARD
    return f"{split}-{{000000..{last:06d}}}.tar", count


@dataclass(frozen=True)
class SetInfo:
    """What a set is: its name, the version of its making, where its content is from and under which licence."""

    name: str
    version: str
    source: str
    licence: str


def write_set(
    folder: Path, info: SetInfo, splits: Mapping[str, Sequence[NewSample]], vocab_size: int, progress: Progress | None
) -> None:
    """Write all splits, a tokenizer trained on the training texts, and dataset.json last."""
    patterns, counts = {}, {}
    for done, (split, samples) in enumerate(splits.items()):
        if progress:
            progress(done, len(splits) + 1, f"shards of {split}")
        patterns[split], counts[split] = write_shards(folder, split, samples)
    if progress:
        progress(len(splits), len(splits) + 1, "tokenizer")
    texts = [turn["value"].replace("<image>\n", "") for s in splits["train"] for turn in s.json["conversations"]]
    (folder / "tokenizer.json").write_bytes(train_tokenizer(texts, vocab_size))
    description = {**info.__dict__, "splits": patterns, "samples": counts, "tokenizer": "tokenizer.json"}
    (folder / DESCRIPTION).write_text(json.dumps(description, indent=1), encoding="utf-8")
