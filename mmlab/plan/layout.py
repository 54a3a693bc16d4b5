"""Which rank is what, and on which node: rank <-> role and coordinates, and the groups that communicate.

The encoder's ranks come first, then the language grid, stage-major: one `arange(pp * dp * cp * tp).view(pp, dp, cp,
tp)` behind them. So the ranks of a tensor group are neighbours, and a stage's ranks are contiguous. Where the encoder
has no ranks of its own, ranks of the grid encode too: those of the first stage, or all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, Literal

from mmlab.plan.holders import beside_encoder
from mmlab.plan.placement import layout_html, layout_svg, layout_text
from mmlab.plan.schema import MODULES, Plan
from mmlab.plan.stages import stages_of


@dataclass(frozen=True)
class Place:
    """What one rank is: its node, role and coordinates (-1 where the role has none).

    `vision` is the index among the ranks that encode, whatever their role; `dp`, `pp` (stage), `cp` and `tp` are those
    of the language grid.
    """

    rank: int
    node: int
    role: Literal["vision", "language"]
    vision: int = -1
    dp: int = -1
    pp: int = -1
    cp: int = -1
    tp: int = -1
    label: str = ""
    """Short name: "vision 0", "stage 1 tp 0", with cp and dp where those degrees are above 1."""


class Layout:
    """The places of all ranks of a plan and the groups among them (each group a list of ranks)."""

    def __init__(self, plan: Plan) -> None:
        p = plan.parallel
        self.plan = plan
        self.first = p.vision_dp if p.vision == "own_ranks" else 0
        """Number of encoder ranks; the rank of the first language rank."""
        grid = p.dp * p.cp * p.tp
        encoders = {"own_ranks": self.first, "first_stage": grid, "all_ranks": grid * p.pp}[p.vision]
        self.vision_ranks = list(range(encoders))
        """Ranks that encode images: `vision_ranks[place.vision]` is the rank of a place (the index is the rank)."""
        self.stages = stages_of(plan)
        """How the decoder is cut into stages, and which rank of a pipeline holds which."""
        nodes = _pack(plan, self.first)
        self.places = [self._make(rank, node) for rank, node in enumerate(nodes)]
        """The place of every rank, in rank order."""

    def _make(self, rank: int, node: int) -> Place:
        if rank < self.first:
            return Place(rank, node, "vision", vision=rank, label=f"vision {rank}")
        p = self.plan.parallel
        rest, tp = divmod(rank - self.first, p.tp)
        rest, cp = divmod(rest, p.cp)
        pp, dp = divmod(rest, p.dp)
        label = f"stage {pp} tp {tp}" + (f" cp {cp}" if p.cp > 1 else "") + (f" dp {dp}" if p.dp > 1 else "")
        vision = rank if rank < len(self.vision_ranks) else -1
        return Place(rank, node, "language", vision=vision, dp=dp, pp=pp, cp=cp, tp=tp, label=label)

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.places)

    @property
    def nodes(self) -> list[list[int]]:
        """Ranks of each node."""
        count = max(place.node for place in self.places) + 1
        return [[place.rank for place in self.places if place.node == node] for node in range(count)]

    def place(self, rank: int) -> Place:
        """The place of a rank. IndexError outside 0..world_size-1."""
        if rank < 0:
            raise IndexError(f"no rank {rank}")
        return self.places[rank]

    def rank_of(self, *, pp: int, dp: int = 0, cp: int = 0, tp: int = 0) -> int:
        """The language rank at these coordinates. IndexError where they exceed the degrees."""
        p = self.plan.parallel
        for name, value, size in (("pp", pp, p.pp), ("dp", dp, p.dp), ("cp", cp, p.cp), ("tp", tp, p.tp)):
            if not 0 <= value < size:
                raise IndexError(f"{name} {value} is outside 0..{size - 1}")
        return self.first + ((pp * p.dp + dp) * p.cp + cp) * p.tp + tp

    def stage_ranks(self, pp: int) -> list[int]:
        """All ranks at one position of their pipelines."""
        p = self.plan.parallel
        size = p.dp * p.cp * p.tp
        start = self.rank_of(pp=pp)
        return list(range(start, start + size))

    def encoders_of(self, replica: int) -> list[int]:
        """Ranks that may encode the images of a replica: merged with the first stage, its own ranks alone."""
        if self.plan.parallel.vision != "first_stage":
            return self.vision_ranks
        return self.token_ranks(replica)

    def token_ranks(self, replica: int) -> list[int]:
        """Ranks of a replica's first stage, which image tokens go to: cp-major, then tp."""
        return [self.rank_of(pp=0, dp=replica, **at) for at in self._grid("cp", "tp")]

    def layers_of(self, pp: int) -> list[range]:
        """Decoder blocks of a rank at position `pp` of its pipeline: one range for each of its model chunks."""
        return [self.stages.layers[stage] for stage in self.stages.of(pp)]

    def embeds(self, place: Place) -> bool:
        """Whether a rank holds the first stage: the embedding, and what comes from the encoder."""
        return place.pp == self.stages.holders[0][0]

    def heads(self, place: Place) -> bool:
        """Whether a rank holds the last stage: the final norm, the output layer and the loss."""
        return place.pp == self.stages.last_pp

    def _grid(self, *axes: str) -> list[dict[str, int]]:
        sizes = [range(getattr(self.plan.parallel, axis)) for axis in axes]
        return [dict(zip(axes, values, strict=True)) for values in product(*sizes)]

    @cached_property
    def tp_groups(self) -> list[list[int]]:
        """Tensor-parallel groups: same stage, replica and cp."""
        return [[self.rank_of(**at, **to) for to in self._grid("tp")] for at in self._grid("pp", "dp", "cp")]

    @cached_property
    def cp_groups(self) -> list[list[int]]:
        """Context-parallel groups: same stage, replica and tp."""
        return [[self.rank_of(**at, **to) for to in self._grid("cp")] for at in self._grid("pp", "dp", "tp")]

    @cached_property
    def block_groups(self) -> list[list[int]]:
        """Ranks that meet inside every decoder block: same stage and replica."""
        return [[self.rank_of(**at, **to) for to in self._grid("cp", "tp")] for at in self._grid("pp", "dp")]

    @cached_property
    def dp_groups(self) -> list[list[int]]:
        """Replicas that see different samples: same stage, cp and tp."""
        return [[self.rank_of(**at, **to) for to in self._grid("dp")] for at in self._grid("pp", "cp", "tp")]

    def copies(self, module: str) -> list[list[int]]:
        """Groups of ranks that hold the same parameters of a module and see other data."""
        return [self.vision_group] if beside_encoder(self.plan, module) else self.language_groups

    @cached_property
    def language_groups(self) -> list[list[int]]:
        """Gradient reduction of the language model, over replicas and shares of the tokens: same stage and tp."""
        return [[self.rank_of(**at, **to) for to in self._grid("dp", "cp")] for at in self._grid("pp", "tp")]

    @cached_property
    def pipelines(self) -> list[list[int]]:
        """Ranks of each pipeline from first to last stage: same replica, cp and tp."""
        return [[self.rank_of(**at, **to) for to in self._grid("pp")] for at in self._grid("dp", "cp", "tp")]

    @property
    def vision_group(self) -> list[int]:
        """Gradient reduction of the encoder: all ranks that encode."""
        return list(self.vision_ranks)

    @cached_property
    def embedding_groups(self) -> list[list[int]]:
        """The ranks of first and last stage of each pipeline, which share the embedding table; none where one rank
        holds both."""
        last = self.stages.last_pp
        return [[pipe[0], pipe[last]] for pipe in self.pipelines] if last > 0 else []

    def groups(self, axis: str) -> list[list[int]]:
        """The ranks that talk to each other on an axis of `mmlab.messages.AXES`; groups of one are left out.

        KeyError for an unknown axis.
        """
        groups = {
            "tp": self.tp_groups,
            "cp": self.cp_groups,
            "cp_skipped": self.cp_groups,
            "pp": self.pipelines,
            "tokens": self._token_groups(),
            **{module: self.copies(module) for module in MODULES},
            "sharding": self.language_groups,
            "embedding": self.embedding_groups,
        }
        return [group for group in groups[axis] if len(group) > 1]

    def _token_groups(self) -> list[list[int]]:
        """Ranks among which image tokens travel: those that encode and the first stage, or each replica's own."""
        if self.plan.parallel.vision == "first_stage":
            return [self.token_ranks(replica) for replica in range(self.plan.parallel.dp)]
        return [sorted({*self.vision_ranks, *self.stage_ranks(0)})]

    def group_of(self, groups: list[list[int]], rank: int) -> list[int]:
        """The group among `groups` that holds a rank; empty where none does."""
        return next((group for group in groups if rank in group), [])

    def svg(self) -> str:
        """The placement as a picture: nodes, in them the encoder group and the tensor groups."""
        return layout_svg(self)

    def __str__(self) -> str:
        return layout_text(self)

    def __repr__(self) -> str:
        return str(self)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": layout_html(self), "image/svg+xml": self.svg()}


def _pack(plan: Plan, encoders: int) -> list[int]:
    """The node of each rank, filled in rank order.

    A tensor group that does not fit into what is left of a node goes to the next, since its collectives run in every
    block; the encoder group starts node 0, which the first stage's first tensor group then joins. Groups larger than a
    node (which the rules refuse) spill over.
    """
    p, room = plan.parallel, plan.cluster.ranks_per_node
    if room == 0:
        return [0] * plan.world_size
    blocks = [1] * encoders + [p.tp] * (p.pp * p.dp * p.cp)
    nodes: list[int] = []
    node, used = 0, 0
    for block in blocks:
        if used and used + block > room:
            node, used = node + 1, 0
        for _ in range(block):
            if used == room:
                node, used = node + 1, 0
            nodes.append(node)
            used += 1
    return nodes
