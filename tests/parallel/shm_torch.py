"""What torch's own parallelism computes on the shared-memory backend; run with either backend."""

import copy

import shm_functions
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


def network():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block()).double()


def batch(index):
    return torch.randn(6, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(index))


def reference(parts):
    """Gradients of one process over all parts."""
    model = network()
    for part in range(parts):
        (model(batch(part)).square().sum() / parts).backward()
    return {name: param.grad for name, param in model.named_parameters()}


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def worst(model, wanted):
    return max((whole(p.grad) - wanted[n]).abs().max().item() for n, p in model.named_parameters())


def fsdp(rank, world, host, port, folder):
    """FSDP2, also with bf16, then a checkpoint saved and loaded into another sharding."""
    shm_functions.join(rank, world, host, port)
    model = network()
    for block in model:
        fully_shard(block)
    fully_shard(model)
    model(batch(rank)).square().sum().backward()
    found = {"fsdp": worst(model, reference(world))}
    torch.optim.SGD(model.parameters(), lr=0.1).step()

    saved = get_model_state_dict(model)
    dcp.save(saved, checkpoint_id=folder)
    fresh = fully_shard(network())
    state = get_model_state_dict(fresh)
    dcp.load(state, checkpoint_id=folder)
    same = all(torch.equal(whole(state[name]), whole(saved[name])) for name in saved)
    found["checkpoint"] = same and len(saved) == 8
    future = dcp.async_save(saved, checkpoint_id=f"{folder}-async")
    future.result()

    half = network().float()
    fully_shard(half, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    half(batch(rank).float()).square().sum().backward()
    exact = {name: grad.float() for name, grad in reference(world).items()}
    found["bf16"] = worst(half, exact) / max(grad.abs().max().item() for grad in exact.values())
    return found


def tensor_parallel(rank, world, host, port):
    """DTensor tensor parallel, with FSDP2 over the other dimension of a mesh of four."""
    shm_functions.join(rank, world, host, port)
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    model = network()
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if world > 2:
        for block in model:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    part = rank // 2
    model(batch(part)).square().sum().backward()
    found = {"tp": worst(model, reference(world // 2))}
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    wanted = torch.stack([g.norm() for g in reference(world // 2).values()]).norm()
    found["norm"] = abs(whole(norm).item() - wanted.item())
    table = torch.arange(24.0).view(6, 4)
    sharded = distribute_tensor(table, mesh["tp"], [Shard(0)])
    moved = sharded.redistribute(placements=[Shard(1)])
    found["moved"] = (moved.full_tensor() - table).abs().max().item()
    return found


def replicas(rank, world, host, port):
    """DistributedDataParallel, and HSDP's two groups where there are four ranks."""
    shm_functions.join(rank, world, host, port)
    model = DistributedDataParallel(network())
    model(batch(rank)).square().sum().backward()
    found = {"ddp": worst(model.module, reference(world))}
    if world == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        hybrid = fully_shard(network(), mesh=mesh)
        hybrid(batch(rank)).square().sum().backward()
        found["hsdp"] = worst(hybrid, reference(world))
    return found


def pipeline(rank, world, host, port):
    """1F1B of torch.distributed.pipelining over two stages."""
    shm_functions.join(rank, world, host, port)
    whole_model = network()
    stage = PipelineStage(copy.deepcopy(whole_model[rank]), rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=4, loss_fn=lambda out, _: out.square().sum(), scale_grads=False)
    data = torch.cat([batch(0), batch(1)])
    if rank == 0:
        schedule.step(data)
    else:
        schedule.step(target=torch.zeros(12, 16, dtype=torch.float64))
    whole_model(data).square().sum().backward()
    grads = zip(stage.submod.parameters(), whole_model[rank].parameters(), strict=True)
    dist.barrier()
    return max((a.grad - b.grad).abs().max().item() for a, b in grads)
