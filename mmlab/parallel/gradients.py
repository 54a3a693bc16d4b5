"""Gradients: packed into buckets, summed over data-parallel ranks while backward goes on, measured, clipped.

The loss is a sum over target tokens divided by the global count (design,
decision 7), so gradients are summed over ranks and never averaged.

A bucket starts as soon as the last backward of the step has filled it and all
buckets before it have started (Li et al. 2020, "PyTorch Distributed", section
3.2.3): the order is fixed, so all ranks of a group issue the same calls in the
same order whatever the timing, also when one had no image.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from mmlab.parallel.buckets import Bucket, Trained, local_tensor, split, split_over_tp
from mmlab.parallel.compression.sums import BucketSum, DenseSum, make_sum
from mmlab.parallel.compression.wire import Wire
from mmlab.parallel.scatter import ScatterSums, Unit
from mmlab.parallel.tensor import TensorGroup
from mmlab.parallel.traffic import Traffic
from mmlab.plan.schema import MODULES, GroupCommunication

Share = Callable[[Bucket, int, float], None]
"""Makes of a bucket's gradients this rank's share of what a group is to sum."""


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of (start, end) spans: buckets under way at the same time count once."""
    total, until = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total


@dataclass(frozen=True)
class Overlap:
    """How long any of a module's gradients were under way in a step, and how long the rank waited for them; seconds."""

    seconds: float = 0.0
    exposed: float = 0.0


@dataclass(frozen=True)
class Coding:
    """What compression did to one module's gradients in a step, as this rank has it.

    `seconds` spent coding; `residual` squared norm of what this rank has left out so far; `error` and `dense` squared
    norms of (reduced - reduced without compression) and of the latter, of the parameters that this rank counts; zero in
    a step that did not measure. `whole` bytes of its gradients as they are, `kept` of what is kept between steps. Sums
    over the ranks are those of the model.
    """

    seconds: float = 0.0
    residual: float = 0.0
    error: float = 0.0
    dense: float = 0.0
    whole: int = 0
    kept: int = 0


class Reducer:
    """All gradients of one rank: buckets of each module, summed over that module's group.

    Args:
        trained: what trains on this rank.
        groups: data-parallel group of each module, None where the rank is alone.
        bucket_bytes: upper bound of a bucket of each module.
        tp: the tensor group, for gradients that are partial over it.
        traffic: where the bytes of the data-parallel groups are counted.
        undoable: whether a step may turn out to be left out (fp16), see `undo`.
        sharded: the reductions inside backward of modules that FSDP2 holds.

    `grads[name]` is a view of a parameter's gradient, in the parameter's local shape. `unit` is what gradients are
    multiplied by (the loss scale), `measure` whether the coming step is also reduced without compression. `share`, if
    there is one, makes of a full bucket what is to be summed instead, in place: (bucket, ranks that sum it, unit).
    """

    def __init__(
        self,
        trained: list[Trained],
        groups: Mapping[str, dist.ProcessGroup | None],
        bucket_bytes: Mapping[str, float],
        tp: TensorGroup | None = None,
        traffic: Traffic | None = None,
        undoable: bool = False,
        sharded: Mapping[str, ScatterSums] | None = None,
    ) -> None:
        self.trained, self.tp = trained, tp or TensorGroup()
        self.sharded = dict(sharded or {})
        self.wires = {m: Wire(group, m, traffic) for m, group in groups.items() if group is not None}
        self.settings: dict[str, GroupCommunication] = {}
        self.sums: dict[str, BucketSum] = {module: DenseSum() for module in MODULES}
        self.coding = {module: Coding() for module in MODULES}
        self.unit, self.measure = 1.0, False
        self.share: Share | None = None
        self.grads: dict[str, Tensor] = {}
        self.buckets: list[Bucket] = []
        self.partial: list[Bucket] = []
        self.overlap = {module: Overlap() for module in MODULES}
        self._armed: set[str] = set()
        self._next = 0
        self._seconds = dict.fromkeys(MODULES, 0.0)
        self._where: dict[str, Bucket] = {}
        # Backward goes from the loss to the pixels, so the last parameters have their gradients first.
        for module in reversed(MODULES):
            mine = [t for t in reversed(trained) if t.module == module and not t.sharded]
            whole = [t for t in mine if not t.partial_over_tp]
            # Coded together with shards, which differ, what all tensor ranks hold alike would come out differently.
            own = [t for t in whole if self.tp.size == 1 or split_over_tp(t.param)]
            alike = [t for t in whole if self.tp.size > 1 and not split_over_tp(t.param)]
            for members in (*split(own, bucket_bytes[module]), *split(alike, bucket_bytes[module])):
                self.buckets.append(Bucket.of(module, members, undoable))
            for members in split([t for t in mine if t.partial_over_tp], bucket_bytes[module]):
                self.partial.append(Bucket.of(module, members, undoable))
        for bucket in self.packed:
            self.grads.update(bucket.views())
            for t in bucket.members:
                self._where[t.name] = bucket
                t.param.register_post_accumulate_grad_hook(lambda _, t=t: self._accumulated(t))

    def arm(self, names: Iterable[str]) -> None:
        """The backward that follows is the step's last one for these parameters: what it accumulates is complete."""
        self._armed.update(names)

    def complete(self, t: Trained) -> None:
        """Take the gradient of a parameter, now complete, and start what can start."""
        bucket = self._where[t.name]
        if t.name not in bucket.missing:
            return
        self._fill(t)
        bucket.missing.discard(t.name)
        while self._next < len(self.buckets) and not self.buckets[self._next].missing:
            self._start(self.buckets[self._next])
            self._next += 1

    def _accumulated(self, t: Trained) -> None:
        if t.name in self._armed:
            self.complete(t)

    def _fill(self, t: Trained) -> None:
        """Move what backward left in `.grad` into the bucket; no gradient means zero (no image, no target)."""
        grad = t.param.grad
        if grad is None:
            self.grads[t.name].zero_()
        else:
            self.grads[t.name].copy_(local_tensor(grad))
            t.param.grad = None

    def _fill_missing(self, bucket: Bucket) -> None:
        for t in bucket.members:
            if t.name in bucket.missing:
                self._fill(t)

    def configure(self, settings: Mapping[str, GroupCommunication], step: int, restored: bool = False) -> None:
        """Reduce each module as its settings say for a step; between two steps, all ranks alike.

        A change of compressor does with residuals what the settings say, but not where both were `restored` together.
        """
        for module, wanted in settings.items():
            now, before = wanted.at(step), self.settings.get(module)
            if now == before:
                continue
            self.settings[module], self.sums[module] = now, make_sum(now)
            if module in self.sharded:
                self.sharded[module].sum = self.sums[module]
            if before is None or before.compressor == now.compressor or restored:
                continue
            for kept in (each.kept for each in self.keepers if each.module == module):
                kept.factors = {}
                if now.residual == "drop":
                    kept.residual = None

    def set_share(self, share: Share | None, restored: bool = False) -> None:
        """Sum what `share` makes of gradients, or (None) gradients, from the next step on; all ranks alike.

        What is left out of the one is in another unit than the other (of shares of first moments 1 - beta1 of it): it
        is dropped in a change, but not where it was `restored` with `share`.
        """
        if (share is None) != (self.share is None) and not restored:
            for each in self.keepers:
                each.kept.restore(None, {})
        self.share = share

    @property
    def packed(self) -> list[Bucket]:
        """All buckets, in the same order on all ranks of a group."""
        return [*self.buckets, *self.partial]

    @property
    def keepers(self) -> list[Bucket | Unit]:
        """All that keep something between steps: buckets, then the units of what FSDP2 holds."""
        return [*self.packed, *(unit for sums in self.sharded.values() for unit in sums.units)]

    def begin(self, unit: float, measure: bool) -> None:
        """A step begins: its gradients are `unit` times the real ones, and also reduced without compression to
        `measure`."""
        self.unit, self.measure = unit, measure
        for sums in self.sharded.values():
            sums.begin(unit, measure)

    def _start(self, bucket: Bucket) -> None:
        wire = self.wires.get(bucket.module)
        if self.share is not None:
            self.share(bucket, wire.ranks if wire is not None else 1, self.unit)
        if wire is None:  # nothing to compress: what a checkpoint of several ranks had left out is added at once
            bucket.kept.begin()
            bucket.kept.leave(bucket.flat, self.unit, self.sums[bucket.module].residual)
            return
        compressed = not isinstance(self.sums[bucket.module], DenseSum)
        bucket.dense = bucket.flat.clone() if self.measure and compressed else None
        bucket.kept.begin()
        bucket.started, bucket.ended = time.perf_counter(), 0.0
        bucket.rounds = self.sums[bucket.module].rounds(bucket, wire, self.unit)
        self._advance(bucket)

    def _advance(self, bucket: Bucket) -> None:
        """Start the next round of a bucket's reduction, if there is one."""
        assert bucket.rounds is not None
        began = time.perf_counter()
        bucket.work = next(bucket.rounds, None)
        self._seconds[bucket.module] += time.perf_counter() - began
        if bucket.work is None:
            return
        bucket.ended = 0.0  # of the round before
        if bucket.flat.device.type == "cpu":

            def ended(_: object) -> None:
                bucket.ended = time.perf_counter()

            bucket.work.get_future().add_done_callback(ended)

    def finish(self) -> None:
        """Start what is left, in order, and wait for everything: gradients are then those of the global batch."""
        for bucket in self.buckets[self._next :]:
            self._fill_missing(bucket)
            self._start(bucket)
        for bucket in self.partial:
            self._fill_missing(bucket)
            if self.tp.size > 1:
                self.tp.all_reduce(bucket.flat)
            self._start(bucket)
        self._wait()
        self._take_sharded()
        self._take_coding()

    def _take_sharded(self) -> None:
        """Gradients that FSDP2 has summed over the data-parallel ranks."""
        for t in self.trained:
            if t.sharded:
                grad = t.param.grad
                self.grads[t.name] = torch.zeros_like(t.value) if grad is None else local_tensor(grad)
                t.param.grad = None
        partial = [self.grads[t.name] for t in self.trained if t.sharded and t.partial_over_tp]
        if partial and self.tp.size > 1:
            _sum_together(partial, self.tp.all_reduce)

    def _dense_shards(self) -> dict[str, tuple[str, Tensor]]:
        """(module, this rank's rows of the sum without compression) of what FSDP2 holds and this step measured."""
        units = [unit for sums in self.sharded.values() for unit in sums.units if unit.dense is not None]
        found = [(t, part) for unit in units if unit.dense is not None for t, part in unit.laid.mine(unit.dense)]
        partial = [part for t, part in found if t.partial_over_tp]
        if partial and self.tp.size > 1:
            _sum_together(partial, lambda flat: dist.all_reduce(flat, group=self.tp.group))  # measuring: not counted
        for unit in units:
            unit.dense = None
        return {t.name: (t.module, part) for t, part in found if t.counted}

    def _wait(self) -> None:
        """Wait for all rounds of all buckets. Rounds that are left are started in one order on every rank: the second
        of each bucket, as soon as its first is done, then the third."""
        exposed = dict.fromkeys(MODULES, 0.0)
        under_way = [bucket for bucket in self.packed if bucket.work is not None]
        reduced = list(under_way)
        while under_way:
            for bucket in under_way:
                assert bucket.work is not None
                began = time.perf_counter()
                bucket.work.wait()
                now = time.perf_counter()
                exposed[bucket.module] += now - began
                bucket.ended = bucket.ended or now
                self._advance(bucket)
            under_way = [bucket for bucket in under_way if bucket.work is not None]
        for bucket in self.packed:
            bucket.missing = set(bucket.shapes)
        self.overlap = {
            m: Overlap(covered((b.started, b.ended) for b in reduced if b.module == m), exposed[m]) for m in MODULES
        }
        self._armed.clear()
        self._next = 0

    def _take_coding(self) -> None:
        """What compression cost and lost, from all buckets."""
        residual: dict[str, tuple[str, Tensor]] = {}
        mine = {t.name for t in self.trained if t.once}
        counted = {t.name for t in self.trained if t.counted}
        for each in self.keepers:
            if each.kept.residual is not None:
                residual |= {n: (each.module, v) for n, v in each.views(each.kept.residual) if n in mine}
        dense = self._dense_shards()
        for bucket in self.packed:
            if bucket.dense is not None:
                self.wires[bucket.module].uncounted.all_reduce(bucket.dense).wait()
                dense |= {n: (bucket.module, v) for n, v in bucket.views(bucket.dense) if n in counted}
                bucket.dense = None
        error = {n: (m, self.grads[n] - v) for n, (m, v) in dense.items()}
        found = [squared_norms(MODULES, part.values()).tolist() for part in (residual, error, dense)]
        unit = self.unit**2  # residuals are kept without it
        held = [each for each in self.keepers if each.module in self.wires]
        self.coding = {
            m: Coding(
                self._seconds[m] + (self.sharded[m].seconds if m in self.sharded else 0.0),
                found[0][i],
                found[1][i] / unit,
                found[2][i] / unit,
                sum(each.bytes for each in held if each.module == m),
                sum(each.kept.bytes for each in held if each.module == m),
            )
            for i, m in enumerate(MODULES)
        }
        self._seconds = dict.fromkeys(MODULES, 0.0)
        for sums in self.sharded.values():
            sums.seconds = 0.0

    def undo(self) -> None:
        """The step's update is left out (an overflow in fp16): residuals are again what they were before it."""
        for each in self.keepers:
            each.kept.undo()

    def release(self) -> None:
        """Forget the gradients that are made anew in each step (the sharded ones)."""
        for t in self.trained:
            if t.sharded:
                self.grads.pop(t.name, None)

    def squared_norms(self, modules: tuple[str, ...]) -> Tensor:
        """This rank's share of the squared gradient norm of each module, float64 [len(modules)]."""
        return squared_norms(modules, ((t.module, self.grads[t.name]) for t in self.trained if t.counted))

    def scale(self, factor: float) -> None:
        """Multiply all gradients (clipping)."""
        flats = [bucket.flat for bucket in self.packed]
        flats += [self.grads[t.name] for t in self.trained if t.sharded]
        if factor != 1.0 and flats:
            torch._foreach_mul_(flats, factor)


def _sum_together(tensors: list[Tensor], all_reduce: Callable[[Tensor], object]) -> None:
    """Sum tensors over a group in one call, in place."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    all_reduce(flat)
    parts = flat.split([tensor.numel() for tensor in tensors])
    torch._foreach_copy_(tensors, [part.view(t.shape) for t, part in zip(tensors, parts, strict=True)])


def squared_norms(modules: tuple[str, ...], grads: Iterable[tuple[str, Tensor]]) -> Tensor:
    """Squared norm of each module's gradients, from (module, gradient or part of one); float64 [len(modules)]."""
    found, sums = list(grads), torch.zeros(len(modules), dtype=torch.float64)
    for index, module in enumerate(modules):
        mine = [grad for of, grad in found if of == module]
        if mine:
            norms = torch._foreach_norm(mine, 2, dtype=torch.float64)
            sums[index] = torch.stack(norms).square().sum().cpu()
    return sums


def reduce_tied(grad: Tensor, group: dist.ProcessGroup) -> None:
    """Sum the gradient of the tied embedding over the first and the last stage (Megatron-LM's embedding group)."""
    dist.all_reduce(grad, group=group)
