"""How samples become tiles and steps."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from mmlab.plan.problems import Fix, Problem
from mmlab.plan.schema import Plan
from mmlab.plan.sizes import most_tiles


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
