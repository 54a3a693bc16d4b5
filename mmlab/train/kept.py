"""What compression keeps between steps, as checkpoints hold it: for any layout, and bit for bit for the same one.

`communication.<parameter>.residual` [R, *shape]: row r is what rank r of the R that hold copies of the parameter has
left out. Training only ever sees the sum of the rows, so another number of ranks shares that out among them.
`communication.<parameter>.factor` [T, *shape of a factor]: PowerSGD's, one for each of the T tensor ranks that split
the parameter. Where it does not fit, or nothing has factors here, it is left out: PowerSGD then begins anew.

The last stage's copy of a tied table has gradients and residuals of its own (`copy.residual`); in a layout without
such a copy they belong to the table. What nobody keeps is not in the file. Under tensor parallelism with zero2 or zero3
norms are not coded and keep nothing: what another layout had left out of them is dropped there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard

from mmlab.models.sharding import EMBED_TOKENS
from mmlab.parallel.buckets import Bucket, Trained, split_over_tp
from mmlab.parallel.mesh import Mesh
from mmlab.parallel.scatter import Unit
from mmlab.parallel.sharding import meshes
from mmlab.plan.schema import Plan
from mmlab.train.build import Built, is_tied_copy

Stored = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and format of each tensor in a checkpoint."""


PREFIX = "communication."
"""What names of these tensors begin with."""


def _key(name: str, what: str) -> str:
    return f"{PREFIX}{name}.{what}"


class Rows:
    """How tensors with a row for each holder of a parameter lie on the ranks of a mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._made: dict[tuple[str, bool], DeviceMesh] = {}

    def _holders(self, module: str, split: bool) -> DeviceMesh | None:
        """The ranks that hold copies of a module, with the tensor group as second dim where that splits a parameter;
        None for a rank that is alone."""
        group = self.mesh.reductions.get(module)
        if group is None:
            return self.mesh.tp.mesh if split else None
        if (module, split) not in self._made:
            layout, rank = self.mesh.layout, self.mesh.place.rank
            ranks = layout.group_of(layout.copies(module), rank)
            tp_group = self.mesh.tp.group if split else None
            self._made[module, split] = meshes(layout, rank, ranks, group, self.mesh.device, tp_group)[1]
        return self._made[module, split]

    def ranks(self, module: str) -> tuple[int, int]:
        """(this rank's row, number of rows) of the ranks that hold copies of a module."""
        group = self.mesh.reductions.get(module)
        return (0, 1) if group is None else (group.rank(), group.size())

    def share(self, module: str, rows: int) -> int:
        """How many of `rows` lie on this rank: as torch.chunk cuts."""
        rank, ranks = self.ranks(module)
        each = -(-rows // ranks)
        return max(0, min(rows, (rank + 1) * each) - rank * each)

    def placed(self, t: Trained, local: Tensor, rows: int) -> Tensor:
        """This rank's rows [share, *local shape of the parameter] as its part of [rows, *global shape]."""
        split = split_over_tp(t.param)
        holders = self._holders(t.module, split)
        if holders is None:
            return local
        placements: list[Placement] = [Shard(0)] if self.mesh.reductions.get(t.module) is not None else []
        if split:
            assert isinstance(t.param, DTensor)
            (dim,) = (p.dim for p in t.param.placements[-1:] if isinstance(p, Shard))
            placements.append(Shard(dim + 1))
        return _distributed(local, holders, placements, (rows, *t.param.shape))

    def factor(self, t: Trained, factor: Tensor) -> Tensor:
        """A factor [1, ...] of this rank's shard of a parameter as its part of those of all tensor ranks."""
        if not split_over_tp(t.param):
            return factor
        assert self.mesh.tp.mesh is not None
        return _distributed(factor, self.mesh.tp.mesh, [Shard(0)], (self.mesh.tp.size, *factor.shape[1:]))


def _distributed(local: Tensor, ranks: DeviceMesh, placements: list[Placement], shape: tuple[int, ...]) -> DTensor:
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, ranks, placements, shape=torch.Size(shape), stride=stride)


def _members(built: Built) -> Iterator[tuple[Bucket | Unit, Trained]]:
    for packed in built.reducer.keepers:
        for t in packed.members:
            yield packed, t


def saved(plan: Plan, mesh: Mesh, built: Built) -> dict[str, Tensor]:
    """What this rank saves; tensors share storage with the live ones, but for residuals of what FSDP2 holds: copies,
    of one unit after the other, as their rows lie apart.

    The ranks of a reduction and their tensor groups keep the same things: a residual is made by a reduction, in which
    all of them take part in the same step. So each tensor is whole or absent.
    """
    rows, found = Rows(mesh), {}
    for packed in built.reducer.keepers:
        kept = packed.kept
        residuals = {} if kept.residual is None else dict(packed.parts(kept.residual))
        for t in packed.members:
            own = "copy." if is_tied_copy(plan, mesh.place, t.name) else ""
            if t.name in residuals:
                residual = residuals[t.name][None]
                found[_key(t.name, f"{own}residual")] = rows.placed(t, residual, rows.ranks(t.module)[1])
            if t.name in kept.factors:
                found[_key(t.name, f"{own}factor")] = rows.factor(t, kept.factors[t.name][None])
    return found


class Incoming:
    """What a checkpoint holds for this rank: `tensors` to read into, and `take` for what has been read.

    Args:
        stored: what tensors there are in the checkpoint.
    """

    def __init__(self, stored: Stored, plan: Plan, mesh: Mesh, built: Built) -> None:
        self.plan, self.mesh, self.built, self.rows = plan, mesh, built, Rows(mesh)
        self.tensors: dict[str, Tensor] = {}
        self._residuals: dict[str, list[tuple[Tensor, int]]] = {}
        self._factors: dict[str, Tensor] = {}
        for packed, t in _members(built):
            own = "copy." if is_tied_copy(plan, mesh.place, t.name) else ""
            for part in self._parts(t, own):
                if (key := _key(t.name, f"{part}residual")) in stored:
                    count = stored[key][0][0]
                    rows = t.value.new_empty(self.rows.share(t.module, count), *packed.shapes[t.name])
                    self.tensors[key] = self.rows.placed(t, rows, count)
                    self._residuals.setdefault(t.name, []).append((rows, count))
            key = _key(t.name, f"{own}factor")
            shape, dtype = stored.get(key, ((0,), torch.float32))
            used = isinstance(packed, Bucket) and t.module in built.reducer.wires
            if used and shape[0] == (mesh.tp.size if split_over_tp(t.param) else 1):
                factor = t.value.new_empty(1, *shape[1:], dtype=dtype)
                self.tensors[key] = self.rows.factor(t, factor)
                self._factors[t.name] = factor[0]

    def _parts(self, t: Trained, own: str) -> tuple[str, ...]:
        """Whose residuals in a checkpoint a parameter has here: its own, and its copy's where there is none."""
        tied = self.plan.model.language.tied_embeddings and t.name == EMBED_TOKENS
        return (own, "copy.") if tied and not self.mesh.layout.embedding_groups else (own,)

    def take(self) -> None:
        """Keep what has been read, and nothing else; all ranks together."""
        for packed in self.built.reducer.keepers:
            residual = None
            if any(name in self._residuals for name in packed.shapes):
                residual = packed.residual()
                for t in packed.members:
                    parts = [self._mine(t, rows, count) for rows, count in self._residuals.get(t.name, ())]
                    if parts:
                        packed.put(residual, t.name, parts[0] if len(parts) == 1 else parts[0] + parts[1])
            factors = {name: self._factors[name] for name in packed.shapes if name in self._factors}
            packed.kept.restore(residual, factors)

    def _mine(self, t: Trained, rows: Tensor, count: int) -> Tensor:
        """This rank's residual from its share of the saved rows [share, *local shape]: its own row, or with another
        number of ranks its part of the sum of all."""
        _, ranks = self.rows.ranks(t.module)
        if count == ranks:
            return rows[0]
        total = rows.sum(0)
        wire = self.built.reducer.wires.get(t.module)
        if wire is not None:
            wire.uncounted.all_reduce(total).wait()
        return total.div_(ranks)
