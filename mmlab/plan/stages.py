"""How the decoder is cut into stages, and which rank of a pipeline holds which of them.

With several model chunks a rank holds several stages (also called virtual stages). What enters the model enters stage
0, what leaves it leaves the last one, whatever rank that is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from mmlab.plan.schema import Plan


@dataclass(frozen=True)
class Stages:
    """The stages of one pipeline of `pp` ranks with `chunks` model chunks each; `layers[stage]` are its blocks."""

    pp: int
    chunks: int
    folded: bool
    """Whether the second chunk runs back from the last rank to the first (zb_v); else chunks follow each other."""
    layers: tuple[range, ...]

    @property
    def count(self) -> int:
        """Number of stages."""
        return self.pp * self.chunks

    def at(self, pp: int, chunk: int) -> int:
        """The stage that is a rank's chunk."""
        if self.folded and chunk == 1:
            return self.count - 1 - pp
        return chunk * self.pp + pp

    @cached_property
    def holders(self) -> tuple[tuple[int, int], ...]:
        """(rank of the pipeline, chunk) of each stage."""
        found = {self.at(pp, chunk): (pp, chunk) for pp in range(self.pp) for chunk in range(self.chunks)}
        return tuple(found[stage] for stage in range(self.count))

    @property
    def last_pp(self) -> int:
        """The rank of the pipeline that holds the last stage: the final norm, the output layer and the loss."""
        return self.holders[-1][0]

    def of(self, pp: int) -> list[int]:
        """The stages that a rank of the pipeline holds, by chunk."""
        return [self.at(pp, chunk) for chunk in range(self.chunks)]


def even_split(layers: int, stages: int) -> tuple[int, ...]:
    """Decoder blocks of each stage, as even as possible; earlier stages take the extra ones."""
    share, extra = divmod(layers, stages)
    return tuple(share + (stage < extra) for stage in range(stages))


def stages_of(plan: Plan) -> Stages:
    """The stages of a plan: `layers_per_stage` where given, else an even split."""
    p = plan.parallel
    count = p.pp * p.chunks_per_rank
    sizes = p.layers_per_stage or even_split(plan.model.language.layers, count)
    ends = list(accumulate(sizes))
    return Stages(p.pp, p.chunks_per_rank, p.schedule == "zb_v", tuple(map(range, [0, *ends[:-1]], ends)))
