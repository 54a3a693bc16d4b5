"""How samples become tiles and steps."""

from __future__ import annotations

from collections.abc import Iterator

from mmlab.plan.problems import Fix, Problem
from mmlab.plan.schema import Plan
from mmlab.plan.sizes import most_tiles


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
