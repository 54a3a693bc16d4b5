"""From the plan's words to files: which shards a split has, and which tokenizer reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from mmlab.data.cache import exclusive, place_beside, write_beside
from mmlab.data.datasets import BUILT_IN, DESCRIPTION, ensure
from mmlab.data.index import Progress, read_turns
from mmlab.data.remote import beside, is_address, is_remote, join, remote_folder, set_limit, shown_name
from mmlab.data.shards import Member, ShardFiles, expand_shards, scan_shard
from mmlab.data.tokenizer import train_tokenizer
from mmlab.errors import DataError
from mmlab.plan.schema import Plan

_TEXT_FOR_TOKENIZER = 20_000_000
"""Characters of the shards' text from which a tokenizer is trained where there is none: more change it little."""


def _folder(path: str, progress: Progress | None) -> Path | None:
    """The folder that a source names: a built-in set's (made on first use) or an existing one.

    A built-in name always means the built-in set, wherever the run starts; "./emoji" is a folder of that name.
    """
    if path in BUILT_IN:
        return ensure(path, progress)
    return Path(path) if Path(path).is_dir() else None


def _set(path: str, progress: Progress | None) -> tuple[str, dict[str, Any] | None]:
    """(where the names of its shards start from, its dataset.json) of what a source names, local or remote."""
    folder = remote_folder(path) if is_remote(path) else _folder(path, progress)
    return path if is_remote(path) else str(folder or path), _description(folder) if folder else None


def _within(base: str, name: str) -> str:
    return join(base, name) if is_remote(base) else str(Path(base) / name)


def _description(folder: Path) -> dict[str, Any] | None:
    """The dataset.json of a set that mmlab made; None for other folders."""
    try:
        value = json.loads((folder / DESCRIPTION).read_bytes())
        return value if isinstance(value.get("splits"), dict) else None
    except FileNotFoundError:
        return None
    except (OSError, ValueError, AttributeError) as error:
        raise DataError(f"{folder / DESCRIPTION}: cannot be read ({error}). Make the set again or remove it.") from None


def _named(plan: Plan) -> list[tuple[str, str]]:
    """(field, pattern) of each source that the plan names."""
    return [("data.sources", path) for path in plan.data.sources] or [("data.path", plan.data.path)]


def find_sources(plan: Plan, split: Literal["train", "held_out"], progress: Progress | None = None) -> list[list[Path]]:
    """Shards of a split, in order, of each source; held-out samples are one source. DataError naming the field when
    there are none."""
    if any(is_remote(path) for path in (plan.data.path, *plan.data.sources, plan.data.held_out)):
        set_limit(plan.data.cache_mb)
    if split == "held_out" and plan.data.held_out:
        return [expand_shards(plan.data.held_out, "data.held_out")]
    found = []
    for field, path in _named(plan):
        base, description = _set(path, progress)
        if description and split in description["splits"]:
            found.append(expand_shards(_within(base, description["splits"][split]), field))
        elif split == "train" and not description:
            found.append(expand_shards(path, field))
        elif split == "train":
            raise DataError(f'{field} = "{path}": this set has no train split.')
    if split == "held_out":
        if not found:
            raise DataError(
                'data.held_out = "": there are no held-out samples. Name shards, or set train.eval_samples=0.'
            )
        return [[shard for shards in found for shard in shards]]
    return found


def shards_of_set(pattern: str, progress: Progress | None = None) -> list[Path]:
    """All shards that a pattern, a folder (local or remote) or a built-in set's name stands for, of every split."""
    base, description = _set(pattern, progress)
    if not description:
        return expand_shards(pattern, "PATH")
    names = dict.fromkeys(description["splits"].values())
    return [shard for name in names for shard in expand_shards(_within(base, name), "PATH")]


def has_held_out(plan: Plan) -> bool:
    """Whether the plan's data have held-out samples (an evaluation is possible)."""
    if plan.data.held_out:
        return True
    described = [_set(path, None)[1] for _, path in _named(plan)]
    return any("held_out" in (one or {"splits": ()})["splits"] for one in described)


def find_tokenizer(plan: Plan, shards: Sequence[Path]) -> Path:
    """The tokenizer.json: data.tokenizer, else the one beside the training shards, else one trained on their text."""
    if plan.data.tokenizer:
        named = Path(plan.data.tokenizer)
        path = named / "tokenizer.json" if named.is_dir() else named
        if not path.is_file():
            raise DataError(f'data.tokenizer = "{plan.data.tokenizer}": no such file. Name a tokenizer.json.')
        return path
    training = [shard for source in find_sources(plan, "train") for shard in source]
    for shard in (training[0], shards[0]):
        found = beside(shard, "tokenizer.json") if is_address(shard) else shard.parent / "tokenizer.json"
        if found and found.is_file():
            return found
    return _trained_tokenizer(training, plan.model.language.vocab_size)


def _trained_tokenizer(shards: Sequence[Path], vocab_size: int) -> Path:
    """A tokenizer trained on the shards' own text, stored beside them or in the cache."""
    places = place_beside(shards[0], f"tokenizer-{vocab_size}.json")
    with exclusive(places[0]):
        for place in places:
            if place.is_file():
                return place
        return write_beside(places, train_tokenizer(_texts(shards), vocab_size))


def _read_member(files: ShardFiles, shard: int, member: Member) -> bytes:
    return files.read(shard, member.offset, member.size)


def _texts(shards: Sequence[Path]) -> Iterator[str]:
    """Prompts and answers of the shards, until there is enough text."""
    left = _TEXT_FOR_TOKENIZER
    files = ShardFiles(shards)
    try:
        for number, shard in enumerate(shards):
            for sample in scan_shard(shard):
                where = f'{shown_name(shard)}: sample "{sample.key}"'
                turns, _ = read_turns(partial(_read_member, files, number), sample, where)
                for turn in turns:
                    yield from (turn.prompt.replace("<image>", " "), turn.answer)
                    left -= len(turn.prompt) + len(turn.answer)
                if left <= 0:
                    return
    finally:
        files.close()
