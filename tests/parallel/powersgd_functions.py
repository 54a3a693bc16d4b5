"""What the tests of PowerSGD run: ranks in one process, ranks of a pool, and the paper's algorithm alone."""

from itertools import zip_longest

import torch
import torch.distributed as dist
from gradient_functions import join

from mmlab.parallel.buckets import Trained
from mmlab.parallel.compression.feedback import Kept, Packed
from mmlab.parallel.compression.powersgd import Matrix, drawn, handed_over
from mmlab.parallel.compression.sums import make_sum
from mmlab.parallel.gradients import Reducer
from mmlab.parallel.traffic import Traffic
from mmlab.plan.schema import MODULES, GroupCommunication


class Shared:
    """A wire of a rank whose group is in this process: `meet` makes the call that all of them have made."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks, self.ordered = rank, ranks, True
        self.tensors: list[torch.Tensor] = []

    def all_reduce(self, tensor: torch.Tensor) -> "Shared":
        self.tensors.append(tensor)
        return self

    @staticmethod
    def meet(wires: list["Shared"]) -> None:
        given = [wire.tensors.pop() for wire in wires]
        total = torch.stack(given).sum(0)
        for tensor in given:
            tensor.copy_(total)


class Ranks:
    """The bucket of each of several ranks, and what sums them."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], ranks: int, dtype=torch.float64, undoable=False, **fields):
        sizes = {name: torch.Size(shape) for name, shape in shapes.items()}
        numel = sum(size.numel() for size in sizes.values())
        self.packed = [Packed(torch.zeros(numel, dtype=dtype), sizes, Kept(undoable=undoable)) for _ in range(ranks)]
        self.fields: dict = {"compressor": "powersgd", "rank": 2, "min_compression_rate": 1.0} | fields
        self.unit = 1.0

    @property
    def settings(self) -> GroupCommunication:
        """Also with a compression rate below 1, at which every matrix has factors, however small."""
        return GroupCommunication().model_copy(update=self.fields)

    def step(self, gradients: list[torch.Tensor], **changed) -> torch.Tensor:
        """Reduce one flat gradient [numel] of each rank; all must have the same bits then, which are returned."""
        self.fields |= changed
        settings = self.settings
        wires = [Shared(rank, len(self.packed)) for rank in range(len(self.packed))]
        rounds = []
        for packed, wire, gradient in zip(self.packed, wires, gradients, strict=True):
            packed.flat.copy_(gradient).mul_(self.unit)
            packed.kept.begin()
            rounds.append(make_sum(settings).rounds(packed, wire, self.unit))
        for works in zip_longest(*rounds):
            assert list(works) == wires  # all ranks make the same calls
            Shared.meet(wires)
        for packed in self.packed[1:]:
            torch.testing.assert_close(packed.flat, self.packed[0].flat, rtol=0, atol=0, equal_nan=True)
        return self.packed[0].flat / self.unit

    def residuals(self) -> torch.Tensor:
        """Sum over the ranks of what was left out [numel]."""
        return sum(packed.kept.residual for packed in self.packed)

    def factors(self, name: str) -> torch.Tensor:
        found = [packed.kept.factors[name] for packed in self.packed]
        assert all(torch.equal(other, found[0]) for other in found[1:])
        return found[0]


def normal(rank: int, step: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 * step + rank))


def paper(
    gradients: list[torch.Tensor], errors: list[torch.Tensor], q: torch.Tensor
) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """Algorithms 1 and 2 of the paper for one matrix: the reduced gradient, each worker's new error, and the new Q
    [m, r]. Sums instead of means; orthogonal by Gram-Schmidt, one column after the other."""
    corrected = [gradient + error for gradient, error in zip(gradients, errors, strict=True)]
    p = sum(m @ q for m in corrected)
    for column in range(p.shape[1]):
        for before in range(column):
            p[:, column] -= (p[:, before] @ p[:, column]) * p[:, before]
        p[:, column] /= p[:, column].norm()
    qs = [m.T @ p for m in corrected]
    return p @ sum(qs).T, [m - p @ own.T for m, own in zip(corrected, qs, strict=True)], sum(qs)


# -- ranks of a pool


SHAPES = ((24, 16), (16,), (12, 40), (8, 3, 2, 2), (30, 1))


def many_buckets(rank, world, host, port, backends, steps) -> dict:
    """Steps of 40 parameters in 40 buckets, through the reducer, over each backend in turn; two modules are
    compressed, the encoder with other settings."""
    join(rank, world, host, port, "gloo")
    found = {}
    for backend in backends:
        if backend == "shm":
            from mmlab.parallel import shm

            shm.register()
        groups = {module: dist.new_group(backend=backend) for module in MODULES}
        traffic = Traffic()
        parameters = [torch.nn.Parameter(torch.zeros(SHAPES[i % len(SHAPES)])) for i in range(40)]
        trained = [Trained(f"p{i}", p, p.detach(), MODULES[2 * (i % 2)], True) for i, p in enumerate(parameters)]
        reducer = Reducer(trained, groups, dict.fromkeys(MODULES, 1.0), traffic=traffic)
        assert len(reducer.buckets) == 40
        settings = {
            "vision": GroupCommunication(compressor="powersgd", rank=1, min_compression_rate=1.0),
            "language": GroupCommunication(compressor="powersgd", rank=3, min_compression_rate=1.5),
        }
        reducer.configure(settings, 1)
        predicted = {
            module: steps * sum(
                handed_over(bucket.shapes, settings[module], torch.float32, reducer.wires[module])
                for bucket in reducer.buckets if bucket.module == module
            ) for module in settings
        }  # fmt: skip
        grads, residuals = [], []
        for step in range(steps):
            reducer.arm(t.name for t in trained)
            weights = [normal(rank + 10 * i, step, *p.shape).float() for i, p in enumerate(parameters)]
            sum((p * w).sum() for p, w in zip(parameters, weights, strict=True)).backward()
            reducer.finish()
            grads.append(torch.cat([reducer.grads[t.name].flatten() for t in trained]))
            left = {name: v for b in reducer.buckets for name, v in b.views(b.kept.residual)}
            residuals.append(torch.cat([left[t.name].flatten() for t in trained]))
        found[backend] = {
            "grads": grads, "residuals": residuals, "bytes": {m: traffic.bytes[m] for m in settings},
            "predicted": predicted, "drawn": drawn(Matrix("p0", 0, 24, 16, 3), 0, parameters[0]),
        }  # fmt: skip
    return found
