"""How samples become tiles and steps."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from mmlab.plan.problems import Fix, Problem
from mmlab.plan.schema import Plan
from mmlab.plan.sizes import most_tiles

MAX_WINDOW = 1 << 14
"""Samples of a bucket window: dealing them takes every rank a second at this size, and half of it evens out as well."""


def backend(plan: Plan) -> Iterator[Problem]:
    """What decodes images is installed."""
    if plan.data.backend == "dali" and not has_dali():
        message = 'NVIDIA DALI is not installed here. pip install "mmlab[dali]" (Linux alone has it).'
        yield Problem("data.backend", message, Fix("decode with Pillow", ("data.backend=pillow",)))


def has_dali() -> bool:
    """Whether this machine has NVIDIA DALI."""
    try:
        return importlib.util.find_spec("nvidia.dali") is not None
    except ModuleNotFoundError:  # there is not even a package "nvidia"
        return False


def tiles(plan: Plan) -> Iterator[Problem]:
    """A sample holds a picture of several tiles."""
    d, image = plan.data, plan.model.vision.tokens_per_tile
    if d.max_tiles == 1 or most_tiles(plan) > 1 or d.seq_len < image + 2:  # the last is `general.sequence`'s
        return
    wanted = (d.max_tiles + d.thumbnail) * image + 64
    least = 2 + d.thumbnail
    whole = " and a thumbnail" if d.thumbnail else ""
    message = (
        f"{d.max_tiles} tiles a picture, but {d.seq_len} tokens a sample (data.seq_len) do not hold the "
        f"{least * image} of two{whole} with text: every picture would be one tile."
    )
    longer = plan.model.language.max_positions < wanted
    positions = (f"model.language.max_positions={wanted}",) if longer else ()
    yield Problem("data.max_tiles", message, Fix("make room for all", (f"data.seq_len={wanted}", *positions)))


def buckets(plan: Plan) -> Iterator[Problem]:
    """A window holds whole steps."""
    d = plan.data
    if not d.bucket_window:
        return
    steps = -(-d.bucket_window // d.global_batch)
    if d.bucket_window > MAX_WINDOW:
        least = max(1, MAX_WINDOW // d.global_batch) * d.global_batch
        message = f"a window of {d.bucket_window} samples is held by every rank; {MAX_WINDOW} even out as well."
        yield Problem("data.bucket_window", message, Fix("shrink it", (f"data.bucket_window={least}",)))
    elif d.bucket_window % d.global_batch:
        message = f"a window of {d.bucket_window} samples is not whole steps of data.global_batch {d.global_batch}."
        fix = Fix("round it up", (f"data.bucket_window={steps * d.global_batch}",))
        yield Problem("data.bucket_window", message, fix)


def token_budget(plan: Plan) -> Iterator[Problem]:
    """A microbatch holds a sample with an image."""
    budget, image = plan.data.token_budget, plan.model.vision.tokens_per_tile
    if budget and budget < image + 2:
        message = f"{budget} tokens a microbatch do not hold the {image} of one image and text."
        fix = Fix("admit the longest sample", (f"data.token_budget={max(plan.data.seq_len, image + 2)}",))
        yield Problem("data.token_budget", message, fix)
