"""Image tokens from the ranks that encode to those of the first stage, and their gradients back.

Both sides work out from the step manifest which rows travel between which ranks, so nothing about them is sent. With
transfer = "p2p" every rank of the first stage gets all rows of its replica's images; with "all_gather" each tensor
rank gets a share, what it encoded itself included, and the tensor group gathers the shares. Gradients are equal on all
ranks of a tensor group: an encoder that is one of them takes its own, the others get theirs from tensor rank 0, or each
share from the rank that received it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mmlab.data.manifest import StepManifest
from mmlab.parallel.mesh import Mesh
from mmlab.plan.layout import Layout
from mmlab.plan.schema import Plan
from mmlab.train.precision import compute_dtype


def token_width(plan: Plan) -> int:
    """Width of what crosses the exchange: projected tokens, or encoder features when the first stage projects."""
    return plan.model.language.hidden if plan.parallel.projector == "vision" else plan.model.vision.hidden


def token_dtype(plan: Plan) -> torch.dtype:
    """Format of what crosses the exchange."""
    return compute_dtype(plan.precision.projector if plan.parallel.projector == "vision" else plan.precision.vision)


class Piece(NamedTuple):
    """Rows `start` to `stop` of the rows that one owner has for a microbatch of a replica."""

    owner: int
    start: int
    stop: int


class Route:
    """Which rows of image tokens of one microbatch of a replica each rank of its first stage gets and gives back."""

    def __init__(self, layout: Layout, manifest: StepManifest, replica: int, microbatch: int) -> None:
        self.layout, self.replica = layout, replica
        self.gathers = layout.plan.parallel.transfer == "all_gather"
        per_tile = layout.plan.model.vision.tokens_per_tile
        tiles: dict[int, list[int]] = {}
        count = 0
        for position in manifest.microbatch(replica, microbatch):
            for _ in range(manifest.samples[position].tiles):
                tiles.setdefault(manifest.owner(position), []).append(count)
                count += 1
        self.total = count * per_tile
        """Rows of the microbatch."""
        self.rows = {
            owner: [tile * per_tile + row for tile in tiles[owner] for row in range(per_tile)]
            for owner in sorted(tiles)
        }
        """Where each owner's rows lie among those of the microbatch, in the order of its images."""

    def _rank(self, cp: int, tp: int) -> int:
        return self.layout.rank_of(pp=0, dp=self.replica, cp=cp, tp=tp)

    def _inside(self, cp: int) -> dict[int, int]:
        """owner -> tensor rank of the owners that are members of the tensor group at `cp`."""
        ranks = [self._rank(cp, tp) for tp in range(self.layout.plan.parallel.tp)]
        encoders = self.layout.vision_ranks
        return {owner: ranks.index(encoders[owner]) for owner in self.rows if encoders[owner] in ranks}

    def _share(self, cp: int, tp: int) -> list[Piece]:
        """all_gather: what a rank encoded itself, and its part of an even cut of what comes from outside."""
        inside, size = self._inside(cp), self.layout.plan.parallel.tp
        pieces = [Piece(owner, 0, len(self.rows[owner])) for owner, member in inside.items() if member == tp]
        outside = {owner: len(rows) for owner, rows in self.rows.items() if owner not in inside}
        total, base = sum(outside.values()), 0
        first, last = total * tp // size, total * (tp + 1) // size
        for owner, count in outside.items():
            start, stop = max(first, base) - base, min(last, base + count) - base
            pieces += [Piece(owner, start, stop)] if start < stop else []
            base += count
        return pieces

    def incoming(self, cp: int, tp: int) -> list[Piece]:
        """The rows that a rank of the first stage receives, in the order in which it keeps them."""
        if self.gathers:
            return self._share(cp, tp)
        return [Piece(owner, 0, len(rows)) for owner, rows in self.rows.items()]

    def outgoing(self, cp: int, tp: int) -> list[Piece]:
        """The rows whose gradients a rank of the first stage gives back."""
        inside = self._inside(cp)
        local = [Piece(owner, 0, len(self.rows[owner])) for owner, member in inside.items() if member == tp]
        if self.gathers:
            return local + [piece for piece in self._share(cp, tp) if piece.owner not in inside]
        rest = [Piece(owner, 0, len(rows)) for owner, rows in self.rows.items() if owner not in inside]
        return local + (rest if tp == 0 else [])

    def index(self, pieces: list[Piece]) -> Tensor:
        """Where the rows of pieces, one after another, lie among those of the microbatch; int64."""
        found = [row for piece in pieces for row in self.rows[piece.owner][piece.start : piece.stop]]
        return torch.tensor(found, dtype=torch.int64)

    def receivers(self, owner: int) -> list[tuple[int, Piece]]:
        """(rank, piece) of every rank that receives rows of an owner."""
        return self._of(owner, self.incoming)

    def returners(self, owner: int) -> list[tuple[int, Piece]]:
        """(rank, piece) of every rank that gives gradients back to an owner."""
        return self._of(owner, self.outgoing)

    def _of(self, owner: int, pieces_of: Callable[[int, int], list[Piece]]) -> list[tuple[int, Piece]]:
        p = self.layout.plan.parallel
        return [
            (self._rank(cp, tp), piece)
            for cp, tp in product(range(p.cp), range(p.tp))
            for piece in pieces_of(cp, tp)
            if piece.owner == owner
        ]


class TokenExchange:
    """The first stage's side: image tokens of a microbatch in, their gradients back."""

    def __init__(self, plan: Plan, mesh: Mesh) -> None:
        self.mesh = mesh
        self.width, self.dtype = token_width(plan), token_dtype(plan)
        self._routes: dict[int, Route] = {}

    def receive(self, manifest: StepManifest, microbatch: int) -> Tensor:
        """Image tokens [N*P, D] of a microbatch of this rank's replica, in the order of its images."""
        link, place = self.mesh.tokens, self.mesh.place
        route = self._routes[microbatch] = Route(self.mesh.layout, manifest, place.dp, microbatch)
        pieces = route.incoming(place.cp, place.tp)
        parts = [
            link.recv((piece.stop - piece.start, self.width), self.dtype,
                      self.mesh.layout.vision_ranks[piece.owner], "tokens", microbatch)
            for piece in pieces
        ]  # fmt: skip
        if route.gathers and self.mesh.tp.group is not None and route.total:
            parts, pieces = (
                self._gather(parts, route),
                [piece for tp in range(self.mesh.tp.size) for piece in route.incoming(place.cp, tp)],
            )
        tokens = torch.empty((route.total, self.width), dtype=self.dtype, device=self.mesh.device)
        if parts:
            tokens[route.index(pieces).to(tokens.device)] = torch.cat(parts)
        return tokens

    def _gather(self, parts: list[Tensor], route: Route) -> list[Tensor]:
        """The shares of all ranks of the tensor group, in their order; padded to the largest while they travel."""
        place, tp = self.mesh.place, self.mesh.tp
        sizes = [sum(piece.stop - piece.start for piece in route.incoming(place.cp, at)) for at in range(tp.size)]
        mine = torch.zeros((max(sizes), self.width), dtype=self.dtype, device=self.mesh.device)
        if parts:
            torch.cat(parts, out=mine[: sizes[place.tp]])
        self.mesh.traffic.add("tokens", mine)
        gathered = mine.new_empty((tp.size * max(sizes), self.width))
        dist.all_gather_into_tensor(gathered, mine, group=tp.group)
        return [whole[:size] for whole, size in zip(gathered.split(max(sizes)), sizes, strict=True)]

    def give_back(self, microbatch: int, grad: Tensor) -> None:
        """Send the gradients [N*P, D] of the image tokens that a microbatch received to the images' owners, as far as
        it is this rank's part."""
        place = self.mesh.place
        route = self._routes.pop(microbatch)
        for piece in route.outgoing(place.cp, place.tp):
            peer = self.mesh.layout.vision_ranks[piece.owner]
            rows = grad[route.index([piece]).to(grad.device)]
            self.mesh.token_grads.send(rows, peer, "token_grads", microbatch)
