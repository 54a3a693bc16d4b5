"""What ranks of a pool compute in the tests of tensor-parallel primitives."""

from datetime import timedelta
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from mmlab.parallel import tensor
from mmlab.parallel.tensor import TensorGroup


def join(rank: int, world: int, host: str, port: int) -> TensorGroup:
    limit = timedelta(seconds=30)
    store = dist.TCPStore(host, port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    mesh = DeviceMesh("cpu", list(range(world)), mesh_dim_names=("tp",))
    return TensorGroup(mesh.get_group(), rank, world, mesh)


def copy_and_reduce(rank, world, host, port) -> dict:
    tp = join(rank, world, host, port)
    x = torch.full((3,), rank + 1.0, requires_grad=True)
    copied = tensor.copy_to_group(x, tp)
    copied.backward(torch.full((3,), 10.0 * (rank + 1)))
    copy_grad, x.grad = x.grad, None
    reduced = tensor.reduce_from_group(x, tp)
    reduced.backward(torch.full((3,), 10.0 * (rank + 1)))
    frozen = torch.ones(3)
    trained = torch.ones(3, requires_grad=True)
    with patch.object(dist, "all_reduce", side_effect=AssertionError("nothing is to be communicated")):
        (tensor.copy_to_group(frozen, tp) * trained).sum().backward()
    return {"copied": copied, "copy_grad": copy_grad, "reduced": reduced, "reduce_grad": x.grad}


def gather(rank, world, host, port) -> dict:
    tp = join(rank, world, host, port)
    x = (torch.arange(4.0).view(2, 2) + 10 * rank).requires_grad_()
    whole = tensor.gather_from_group(x, tp)
    whole.backward(torch.arange(4.0 * world).view(2, 2 * world))
    return {"whole": whole, "grad": x.grad}


def embedding(rank, world, host, port, dtype) -> dict:
    tp = join(rank, world, host, port)
    table = torch.randn(12 * world, 5, dtype=dtype, generator=torch.Generator().manual_seed(0))
    ids = torch.randint(12 * world, (40,), generator=torch.Generator().manual_seed(1))
    plain, own = table.clone().requires_grad_(), table.chunk(world)[rank].clone().requires_grad_()
    wanted, rows = F.embedding(ids, plain), tensor.leave_rows(tensor.vocab_parallel_embedding(ids, own, tp), tp)
    wanted.square().sum().backward()
    rows.square().sum().backward()
    return {"same": torch.equal(rows, wanted), "grad": torch.equal(own.grad, plain.grad.chunk(world)[rank])}


def cross_entropy(rank, world, host, port, scale, masked) -> dict:
    """Against F.cross_entropy; `scale` of the logits, `masked`: no position has a target."""
    tp = join(rank, world, host, port)
    logits = scale * torch.randn(9, 8 * world, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = torch.randint(8 * world, (9,), generator=torch.Generator().manual_seed(1))
    targets[2::3] = -100
    if masked:
        targets[:] = -100
    plain, own = logits.clone().requires_grad_(), logits.chunk(world, 1)[rank].clone().requires_grad_()
    wanted = F.cross_entropy(plain, targets, reduction="sum", ignore_index=-100)
    calls = []
    real = dist.all_reduce
    with patch.object(dist, "all_reduce", lambda *args, **kwargs: (calls.append(1), real(*args, **kwargs))):
        loss = tensor.vocab_parallel_cross_entropy(own, targets, tp)
        (2 * loss).backward()
    (2 * wanted).backward()
    return {
        "loss": loss,
        "wanted": wanted,
        "grad": own.grad,
        "wanted_grad": plain.grad.chunk(world, 1)[rank],
        "calls": len(calls),
    }


def local_parameters(rank, world, host, port) -> dict:
    """Gradients come back with the parameter's placements, cast to the master format."""
    tp = join(rank, world, host, port)
    results = {}
    for name, placement in (("split", Shard(0)), ("replicated", Replicate())):
        parameter = torch.nn.Parameter(DTensor.from_local(torch.ones(2, 3), tp.mesh, [placement], run_check=False))
        plain = tensor.local(parameter, torch.bfloat16)
        assert not isinstance(plain, DTensor)
        assert plain.dtype == torch.bfloat16
        (plain * 3.0).sum().backward()
        results[name] = parameter.grad.placements == parameter.placements and parameter.grad.full_tensor()
    return results
