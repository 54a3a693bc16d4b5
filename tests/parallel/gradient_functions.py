"""What ranks of a pool compute in the tests of the reducer."""

import time
from datetime import timedelta
from unittest.mock import patch

import torch
import torch.distributed as dist

from mmlab.parallel import gradients, shm
from mmlab.parallel.buckets import Trained
from mmlab.parallel.gradients import Reducer
from mmlab.parallel.tensor import TensorGroup
from mmlab.parallel.traffic import Traffic

MODULES = ("vision", "projector", "language")


def join(rank: int, world: int, host: str, port: int, backend: str) -> None:
    limit = timedelta(seconds=30)
    store = dist.TCPStore(host, port, is_master=False, timeout=limit)
    if backend == "shm":
        shm.register()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)


def chain(layers: int, width: int) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(torch.full((width, width), 0.1 + 0.01 * i, dtype=torch.float64)) for i in range(layers)]


def forward(parameters: list[torch.nn.Parameter], x: torch.Tensor) -> torch.Tensor:
    for parameter in parameters:
        x = torch.tanh(x @ parameter)
    return x.square().sum()


def trained_of(parameters: list[torch.nn.Parameter], partial: int = -1) -> list[Trained]:
    third = len(parameters) // 3
    return [
        Trained(f"p{i}", p, p.detach(), MODULES[min(i // third, 2)], True, partial_over_tp=i == partial)
        for i, p in enumerate(parameters)
    ]


def steps(rank, world, host, port, backend, imageless) -> dict:
    """Three steps of three microbatches over several ranks; rank 0 has no "vision" gradient when `imageless`."""
    join(rank, world, host, port, backend)
    parameters = chain(6, 8)
    groups = {module: dist.new_group(list(range(world))) for module in MODULES}
    small = dict.fromkeys(MODULES, 8.0 * 8 * 8)
    traffic = Traffic()
    reducer = Reducer(trained_of(parameters), groups, small, traffic=traffic)
    found, started_inside = [], []
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        for microbatch in range(3):
            if microbatch == 2:
                reducer.arm(t.name for t in reducer.trained)
            used = parameters[2:] if imageless and rank == 0 else parameters
            forward(used, torch.randn(4, 8, dtype=torch.float64)).backward()
        started_inside.append(sum(bucket.work is not None for bucket in reducer.buckets))
        reducer.finish()
        found.append({name: grad.clone() for name, grad in reducer.grads.items()})
    overlap = {m: (o.seconds, o.exposed) for m, o in reducer.overlap.items()}
    return {
        "grads": found,
        "inside": started_inside,
        "overlap": overlap,
        "bytes": traffic.bytes,
        "calls": traffic.calls,
    }


def expected(world: int, imageless: bool) -> list[dict[str, torch.Tensor]]:
    parameters = chain(6, 8)
    found = []
    for step in range(3):
        for p in parameters:
            p.grad = torch.zeros_like(p)
        for rank in range(world):
            torch.manual_seed(10 * step + rank)
            for _ in range(3):
                used = parameters[2:] if imageless and rank == 0 else parameters
                forward(used, torch.randn(4, 8, dtype=torch.float64)).backward()
        found.append({f"p{i}": p.grad.clone() for i, p in enumerate(parameters)})
    return found


def call_order(rank, world, host, port) -> list[int]:
    """Sizes of the buckets in the order in which this rank starts them; ranks get their gradients at other times."""
    join(rank, world, host, port, "gloo")
    parameters = [torch.nn.Parameter(torch.ones(i + 1)) for i in range(6)]
    reducer = Reducer(trained_of(parameters), dict.fromkeys(MODULES, dist.group.WORLD), dict.fromkeys(MODULES, 1.0))
    sizes, plain = [], dist.all_reduce

    def watched(tensor, **kwargs):
        sizes.append(tensor.numel())
        return plain(tensor, **kwargs)

    with patch.object(gradients.dist, "all_reduce", watched):
        reducer.arm(t.name for t in reducer.trained)
        order = range(6) if rank == 0 else (5, 0, 3) if rank == 1 else ()
        for i in order:
            (parameters[i].sum() * (rank + 1)).backward()
            time.sleep(0.01)
        reducer.finish()
    return sizes


def partial(rank, world, host, port) -> dict:
    """A gradient that is partial over a tensor group of two and summed over a data-parallel group of two."""
    join(rank, world, host, port, "gloo")
    tensor_groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    data_groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
    reducer = Reducer(
        trained_of(parameters, partial=1), dict.fromkeys(MODULES, data_groups[rank % 2]),
        dict.fromkeys(MODULES, 100.0), TensorGroup(tensor_groups[rank // 2], rank % 2, 2),
    )  # fmt: skip
    sum((p * 10.0**rank).sum() for p in parameters).backward()
    reducer.finish()
    return {name: grad.tolist() for name, grad in reducer.grads.items()}
