"""What FSDP2 sums gradients with: a reduce-scatter of a unit's gradients, as they are or compressed.

FSDP2 hands over the gradients of a unit (a decoder block) as [ranks, columns]: row r has rank r's rows of each
parameter, one parameter after the other, and every rank gets the sum of its own row. A codec codes the rows of the
others; no second round follows, since FSDP2 gathers weights and not gradients. So what coding loses is all on the
senders: the sum of every row and the residuals of all ranks together are the gradients and residuals that went in.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from mmlab.parallel.buckets import Trained, split_over_tp
from mmlab.parallel.compression.exchange import scatter_coded
from mmlab.parallel.compression.feedback import Kept
from mmlab.parallel.compression.sums import BucketSum, CodedSum, DenseSum
from mmlab.parallel.compression.wire import Wire

IN_FLIGHT = 2
"""Units whose gradients may be on their way at once: each is whole in memory until then."""


class Rows:
    """Where parameters lie in [ranks, columns]: their rows are dealt to the ranks as torch.chunk does, and padded.

    `members` are the parameters, `shapes` their whole shapes (those of this tensor rank's shards of them).
    """

    def __init__(self, ranks: int, members: Sequence[tuple[Trained, torch.Size]]) -> None:
        self.ranks = ranks
        self.members = [t for t, _ in members]
        self.shapes = {t.name: shape for t, shape in members}
        self.widths = [-(-shape[0] // ranks) * shape[1:].numel() for _, shape in members]

    @property
    def numel(self) -> int:
        """Elements with the padding."""
        return self.ranks * sum(self.widths)

    def columns(self, flat: Tensor) -> dict[str, Tensor]:
        """Views [ranks, columns of the parameter] in a flat [numel] or (ranks = 1) in one row of it."""
        parts = flat.view(-1, sum(self.widths)).split(self.widths, dim=1)
        return dict(zip(self.shapes, parts, strict=True))

    def clear_padding(self, flat: Tensor) -> None:
        """Make the padding in a flat [numel] zero."""
        for name, part in self.columns(flat).items():
            row, column = divmod(self.shapes[name].numel(), part.shape[1])
            part[row : row + 1, column:] = 0.0
            part[row + 1 :] = 0.0

    def mine(self, row: Tensor) -> Iterator[tuple[Trained, Tensor]]:
        """(parameter, this rank's rows of it) from its row [columns]."""
        for t, part in zip(self.members, row.split(self.widths), strict=True):
            yield t, part[: t.value.numel()].view(t.value.shape)


class Unit(Rows):
    """What is coded of one unit's gradients, and what its reduction keeps between steps.

    `laid` is how FSDP2 lays all of them out. What all tensor ranks hold alike (`plain`; norms) is reduced as it is:
    coded together with shards, which differ, it would come out differently on each.
    """

    def __init__(self, laid: Rows, kept: Kept, over_tp: bool) -> None:
        alike = {t.name for t in laid.members if over_tp and not split_over_tp(t.param)}
        pairs = [(t, laid.shapes[t.name]) for t in laid.members]
        super().__init__(laid.ranks, [(t, shape) for t, shape in pairs if t.name not in alike])
        self.laid, self.kept = laid, kept
        self.plain = Rows(laid.ranks, [(t, shape) for t, shape in pairs if t.name in alike])
        self.module = laid.members[0].module
        self.dense: Tensor | None = None
        """This rank's row of the sums without compression [columns laid], in a step that measures."""

    @property
    def bytes(self) -> int:
        """Memory of the gradients, whole."""
        return self.laid.numel * self.laid.members[0].value.element_size()

    def residual(self) -> Tensor:
        """A residual of zeros, flat [numel]."""
        return self.members[0].value.new_zeros(self.numel)

    def views(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(name, view [ranks, columns of the parameter], with its padding) of each member, in a flat [numel]."""
        yield from self.columns(flat).items()

    def parts(self, flat: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(name, values in the parameter's shape, copied) of each member, from a flat [numel]."""
        for name, part in self.columns(flat).items():
            yield name, part.reshape(-1)[: self.shapes[name].numel()].view(self.shapes[name])

    def put(self, flat: Tensor, name: str, value: Tensor) -> None:
        """Write a member's values into a flat [numel]."""
        part = self.columns(flat)[name]
        padded = value.new_zeros(part.numel())
        padded[: value.numel()] = value.flatten()
        part.copy_(padded.view_as(part))


class ScatterSums:
    """The reductions of one module's units.

    Args:
        wire: the ranks that share the module out.
        over_tp: whether a tensor group splits parameters besides.
        started: whether reductions go on while backward does, until `wait`. That is for CPU, and only where gradients
            are summed once a step: FSDP2 would add a second one to the first as soon as it has started.

    `sum` says how units are reduced; `scale` is what gradients are multiplied by, `measure` whether they are also
    reduced without compression, `seconds` how long coding has taken.
    """

    def __init__(self, wire: Wire, over_tp: bool, started: bool) -> None:
        self.wire, self.over_tp, self.started = wire, over_tp, started
        self.sum: BucketSum = DenseSum()
        self.scale, self.measure, self.seconds = 1.0, False, 0.0
        self.units: list[Unit] = []
        self._under_way: list[tuple[Iterator[dist.Work], dist.Work]] = []

    def attach(self, modules: Sequence[FSDPModule], trained: Mapping[int, Trained], undoable: bool) -> None:
        """Reduce the gradients of modules under FSDP2. `trained` by the id of the parameter; `undoable` as `Kept`."""
        for module in modules:
            params = [p for group in module._get_fsdp_state()._fsdp_param_groups for p in group.fsdp_params]
            mine = [(trained[id(p.sharded_param)], p._orig_size) for p in params if id(p.sharded_param) in trained]
            if mine:
                unit = Unit(Rows(self.wire.ranks, mine), Kept(undoable=undoable), self.over_tp)
                self.units.append(unit)
                module.set_custom_reduce_scatter(_UnitReduction(self, unit))

    def begin(self, scale: float, measure: bool) -> None:
        """A step begins, with gradients `scale` times the real ones."""
        self.scale, self.measure = scale, measure and not isinstance(self.sum, DenseSum)
        for unit in self.units:
            unit.kept.begin()
            unit.dense = None

    def reduce(self, unit: Unit, output: Tensor, flat: Tensor, op: Any) -> None:
        """Sum, or start to, the rows of `flat` [ranks x columns] over the ranks; `output` becomes this rank's."""
        while len(self._under_way) >= IN_FLIGHT:
            self._end(*self._under_way.pop(0))
        if self.measure:
            dense = torch.empty_like(output)
            dist.reduce_scatter_tensor(dense, flat, op=op, group=self.wire.group)
            unit.dense = dense if unit.dense is None else unit.dense.add_(dense)
        rounds = self._rounds(unit, output, flat)
        began = time.perf_counter()
        work = next(rounds)
        self.seconds += time.perf_counter() - began
        if self.started:
            self._under_way.append((rounds, work))
        else:
            self._end(rounds, work)

    def _rounds(self, unit: Unit, output: Tensor, flat: Tensor) -> Iterator[dist.Work]:
        """The collectives of one unit's reduction, each yielded once it is under way."""
        if not unit.members:
            yield self.wire.reduce_scatter(output, flat)
            return
        if not unit.plain.members or (unit.kept.residual is None and not isinstance(self.sum, CodedSum)):
            yield from self._coded(unit, output, flat)
            return
        there, out = unit.laid.columns(flat), unit.laid.columns(output)
        coded, plain = (torch.cat([there[name] for name in rows.shapes], 1) for rows in (unit, unit.plain))
        sums = [output.new_empty(part.shape[1]) for part in (coded, plain)]
        work = self.wire.reduce_scatter(sums[1], plain.view(-1))
        yield from self._coded(unit, sums[0], coded.view(-1))
        work.wait()
        for rows, total in zip((unit, unit.plain), sums, strict=True):
            for name, part in rows.columns(total).items():
                out[name].copy_(part)

    def _coded(self, unit: Unit, output: Tensor, flat: Tensor) -> Iterator[dist.Work]:
        """Sum the rows of `flat` [ranks x columns] as `sum` says."""
        if not isinstance(self.sum, CodedSum):
            unit.kept.leave(flat, self.scale, self.sum.residual)
            yield self.wire.reduce_scatter(output, flat)
            return
        lost = unit.kept.take(flat, self.scale, self.sum.feedback, self.sum.residual)
        rows = list(flat.view(self.wire.ranks, -1))
        losses = None if lost is None else list(lost.view(self.wire.ranks, -1))
        yield from scatter_coded(rows, self.sum.codec, self.wire, losses)
        output.copy_(rows[self.wire.rank])
        if losses is not None and lost is not None:
            losses[self.wire.rank].zero_()
            unit.clear_padding(lost)  # onebit decodes its zeros as +scale: it would be sent, and grow, for ever
            lost.mul_(1.0 / self.scale)

    def _end(self, rounds: Iterator[dist.Work], work: dist.Work) -> None:
        work.wait()
        began = time.perf_counter()
        next(rounds, None)
        self.seconds += time.perf_counter() - began

    def wait(self) -> None:
        """Wait until every gradient is there."""
        while self._under_way:
            self._end(*self._under_way.pop(0))


class _UnitReduction(ReduceScatter):
    """What FSDP2 calls for one unit."""

    def __init__(self, sums: ScatterSums, unit: Unit) -> None:
        self.sums, self.unit = sums, unit

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory for input and output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Sum, or start to. FSDP2 is told to include gradients of zero for what has none, so that all ranks, and all
        steps, have the same layout."""
        if input_tensor.numel() != self.unit.laid.numel:
            raise RuntimeError(f"FSDP2 reduces {input_tensor.numel()} numbers of {', '.join(self.unit.laid.shapes)}")
        self.sums.reduce(self.unit, output_tensor, input_tensor, op)
