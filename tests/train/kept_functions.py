"""What ranks do in the tests of what compression keeps: train, change settings, save, load, say what they hold."""

import gc
import os
from unittest.mock import patch

import torch
import torch.distributed as dist
from sharding_functions import Rank
from torch.distributed.tensor import DTensor

from mmlab.data.order import Position
from mmlab.parallel.buckets import split_over_tp
from mmlab.parallel.compression import powersgd
from mmlab.parallel.compression.exchange import handed_over, slot
from mmlab.parallel.compression.sums import make_codec
from mmlab.parallel.compression.wire import Wire
from mmlab.parallel.scatter import Unit
from mmlab.parallel.traffic import Traffic
from mmlab.plan import set_live
from mmlab.plan.schema import MODULES
from mmlab.train import checkpoint
from mmlab.train.step import Ride


class Kept(Rank):
    """A rank that follows a script of (verb, argument)."""

    def __init__(self, *args):
        super().__init__(*args)
        self.step, self.losses = 0, []

    def train(self, steps):
        for _ in range(steps):
            self.step += 1
            batch = self.feed.batch()
            ride = Ride(next_bad=self.feed.next_bad, next_size=self.plan.data.global_batch)
            result = self.runner.train(self.plan, self.step, batch, ride)
            self.feed.agree(result.next_bad)
            self.losses.append(result.loss)

    def set(self, values):
        self.plan = set_live(self.plan, values)
        self.runner.configure(self.plan, self.step + 1)

    def save(self, folder):
        extra = {
            "step": self.step, "lineage": "a", "cursors": self.feed.cursors.to_json(), "periodic": False,
            "plan": self.plan.dumps(), "loss": 0.0, "loss_scale": self.runner.scale.state(),
        }  # fmt: skip
        checkpoint.save(self.plan, self.mesh, self.built, folder, extra)

    def load(self, folder):
        manifest = checkpoint.load(self.plan, self.mesh, self.built, folder)
        self.step = manifest["step"]
        self.runner.scale.load(manifest["loss_scale"])
        self.runner.configure(self.plan, self.step + 1, restored=True)
        self.feed.reset(Position.from_json(manifest["cursors"]), self.step)

    def held(self):
        """(name, where this rank's part begins, its residual, whether it counts, factor) of all that is kept."""
        found = []
        for packed in self.built.reducer.keepers:
            residuals = dict(packed.parts(packed.kept.residual)) if packed.kept.residual is not None else {}
            for t in packed.members:
                offset = [0] * t.param.dim()
                if split_over_tp(t.param):
                    (placement,) = t.param.placements[-1:]
                    assert isinstance(t.param, DTensor)
                    dim = placement.dim
                    offset[dim] = self.mesh.place.tp * packed.shapes[t.name][dim]
                residual = residuals.get(t.name)
                factor = packed.kept.factors.get(t.name)
                if residual is not None or factor is not None:
                    found.append(
                        (t.name, tuple(offset), tuple(t.param.shape), cloned(residual), t.once, cloned(factor))
                    )
        return found


def cloned(tensor):
    return None if tensor is None else tensor.clone()


def follow(rank, world, host, port, plan_text, script):
    """Losses of all steps, and what the rank holds at each "held" of the script."""
    made = Kept(rank, world, host, port, plan_text)
    found = []
    try:
        for verb, *args in script:
            if verb == "held":
                found.append(made.held())
            else:
                getattr(made, verb)(*args)
        return made.losses, found, {name: value.clone() for name, value in made.runner.weights().items()}
    finally:
        made.runner.close()
        made.close()


class Conserving(Kept):
    """A rank that holds every step against its bookkeeping, parameter by parameter.

    Reduced gradients and residuals of all ranks together are what went in: `worst` is the largest relative difference.
    """

    def __init__(self, *args):
        super().__init__(*args)
        self.reducer = self.built.reducer
        self.worst, self.at, self.seen = 0.0, "", set()
        for sums in self.reducer.sharded.values():  # apart from the gathers, which are counted on the same axis
            sums.wire = Wire(sums.wire.group, "sharding", Traffic())

    def residuals(self):
        """Of every parameter that has one, in the unit of the coming step."""
        found = {}
        for each in self.reducer.keepers:
            if each.kept.residual is not None:
                found |= {name: value.clone() for name, value in each.parts(each.kept.residual)}
        return found

    def train(self, steps):
        for _ in range(steps):
            before, take = self.residuals(), self.reducer._take_coding
            found = {}

            def spy(found=found, take=take):
                found["dense"] = self.dense()
                found["reduced"] = {name: grad.clone() for name, grad in self.reducer.grads.items()}
                take()

            with patch.object(self.reducer, "_take_coding", spy):
                super().train(1)
            self.compare(before, found["dense"], found["reduced"])

    def dense(self):
        """Sums without compression of what this step measured: of what FSDP2 holds this rank's rows."""
        found = {}
        for each in self.reducer.keepers:
            if each.dense is None:
                continue
            if isinstance(each, Unit):
                found |= {t.name: part.clone() for t, part in each.laid.mine(each.dense) if not t.partial_over_tp}
            else:
                total = each.dense.clone()
                dist.all_reduce(total, group=self.reducer.wires[each.module].group)
                found |= dict(each.views(total))
        return found

    def compare(self, before, dense, reduced):
        after, modules = self.residuals(), {t.name: t for t in self.built.trained}
        unit = self.reducer.unit
        for name, total in dense.items():
            t, left = modules[name], torch.zeros_like(total)
            if name in after:
                left = after[name] - before.get(name, 0.0)
                dist.all_reduce(left, group=self.reducer.wires[t.module].group)
                if t.sharded:
                    rows = self.mesh.shards[t.module].rows(len(left))
                    left = left[slice(*rows)]
                self.seen.add(t.module)
            elif self.reducer.settings[t.module].compressor in ("bf16", "fp16"):
                continue  # what they lose is lost
            missing = reduced[name] + unit * left - total
            scale = float(total.norm()) + unit * float(left.norm()) + 1e-300
            if (error := float(missing.norm()) / scale) > self.worst:
                self.worst, self.at = error, name

    def expected(self):
        """Bytes of one step by module, by the formulas."""
        found = dict.fromkeys(MODULES, 0)
        for each in self.reducer.keepers:
            if (wire := self.reducer.wires.get(each.module)) is None:
                continue
            settings = self.reducer.settings[each.module]
            if settings.compressor == "none":
                count = each.bytes
            elif isinstance(each, Unit):
                width, item = sum(each.widths), each.bytes // each.laid.numel
                coded = slot(make_codec(settings), width) if width else 0
                often = self.plan.parallel.microbatches if self.plan.sharding.reduce == "microbatch" else 1
                count = often * ((wire.ranks - 1) * coded + each.plain.numel * item)
            elif settings.compressor == "powersgd":
                count = powersgd.handed_over(each.shapes, settings, each.flat.dtype, wire)
            else:
                count = handed_over(make_codec(settings), each.flat.numel(), wire.ranks, wire.rank)
            found[each.module] += count
        return found

    def counted(self):
        """Bytes of gradients handed over so far, by module."""
        found = {m: self.mesh.traffic.bytes[m] for m in MODULES}
        for m, sums in self.reducer.sharded.items():
            found[m] += sums.wire.traffic.bytes["sharding"]
        return found


def conserve(rank, world, host, port, plan_text, steps):
    """How a rank's bookkeeping comes out over some steps, and its weights and optimizer state after them."""
    made = Conserving(rank, world, host, port, plan_text)
    try:
        made.train(steps)
        coding = {m: (c.residual, c.error, c.dense) for m, c in made.reducer.coding.items()}
        expected = {m: steps * count for m, count in made.expected().items()}
        return {
            "worst": (made.worst, made.at), "seen": made.seen, "coding": coding, "counted": made.counted(),
            "expected": expected, "state": made.state(),
        }  # fmt: skip
    finally:
        made.runner.close()
        made.close()


def sums(ranks):
    """The sum of all residuals of each parameter over all ranks, from what each holds."""
    found = {}
    for held in ranks:
        for name, offset, shape, residual, counts, _ in held:
            if residual is not None and counts:
                region = tuple(slice(o, o + n) for o, n in zip(offset, residual.shape, strict=True))
                found.setdefault(name, torch.zeros(shape, dtype=torch.float64))[region] += residual
    return found


def overflow(rank, world, host, port, plan_text):
    """Steps of which the second overflows: (what is held, weights) before and after each."""
    made = Kept(rank, world, host, port, plan_text)
    found = []

    def note():
        found.append((made.held(), {name: value.clone() for name, value in made.runner.weights().items()}))

    try:
        made.train(1)
        note()
        scale, made.runner.scale.value = made.runner.scale.value, 2.0**40
        made.train(1)
        note()
        made.runner.scale.value = scale
        made.train(1)
        note()
        return found
    finally:
        made.runner.close()
        made.close()


def reading(made):
    """What could leak: tensors and their bytes, what compression keeps, process groups, open files.

    Images and token ids are left out: how many are on their way differs from step to step.
    """
    gc.collect()
    tensors = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    tensors = [t for t in tensors if t.dtype != torch.int64 and t.shape[-2:] != (64, 64)]
    kept = sum(each.kept.bytes for each in made.reducer.keepers)
    return {
        "tensors": len(tensors), "bytes": sum(t.numel() * t.element_size() for t in tensors), "kept": kept,
        "groups": len(dist.distributed_c10d._world.pg_map), "files": len(os.listdir("/proc/self/fd")),
    }  # fmt: skip


def toggle(rank, world, host, port, plan_text, rounds, changes):
    """Live changes with a step after each, over and over: a reading and a sum of the weights' bits after each round."""
    made = Kept(rank, world, host, port, plan_text)
    made.reducer = made.built.reducer
    readings, bits, finite = [], [], True
    try:
        for _ in range(rounds):
            for values in changes:
                made.set(values)
                made.train(1)
                weights = list(made.runner.weights().values())
                finite = finite and all(bool(value.isfinite().all()) for value in weights)
                bits.append(sum(int(value.view(torch.int32).long().sum()) for value in weights))
            readings.append(reading(made))
        return readings, bits, finite, made.losses
    finally:
        made.runner.close()
        made.close()
