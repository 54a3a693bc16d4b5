"""What ranks do in the tests of sharding: train, save, load, say what they hold."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from mmlab.data.pipeline import DataSource
from mmlab.parallel.buckets import local_tensor
from mmlab.parallel.mesh import build_mesh, close_mesh
from mmlab.parallel.watch import Watch
from mmlab.plan import Plan
from mmlab.train import checkpoint
from mmlab.train.build import build
from mmlab.train.feed import Feed
from mmlab.train.step import HybridStep, Ride


class Rank:
    """One rank of a plan, without a run around it."""

    def __init__(self, rank, world, host, port, plan_text):
        self.plan = Plan.loads(plan_text)
        store = dist.TCPStore(host, port, is_master=False) if world > 1 else None
        self.mesh = build_mesh(self.plan, self.plan.layout(), rank, store, torch.device("cpu"))
        self.built = build(self.plan, self.mesh)
        self.feed = Feed(self.plan, self.mesh, DataSource(self.plan))
        self.runner = HybridStep(self.plan, self.mesh, self.built, Watch(telemetry=False))
        self.feed.reset(self.feed.cursors, 0)

    def train(self, steps):
        for step in range(1, steps + 1):
            batch = self.feed.batch()
            ride = Ride(next_bad=self.feed.next_bad, next_size=self.plan.data.global_batch)
            result = self.runner.train(self.plan, step, batch, ride)
            self.feed.agree(result.next_bad)

    def state(self):
        """Checkpointed tensors by name: (where this rank's part begins, its part, the whole shape)."""
        found = {}
        for name, tensor in checkpoint.state_dict(self.plan, self.mesh, self.built, saving=False).items():
            offset = (0,) * tensor.dim()
            if isinstance(tensor, DTensor):
                _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
            found[name] = (tuple(offset), local_tensor(tensor).clone(), tuple(tensor.shape))
        return found

    def save(self, folder):
        cursors = self.feed.cursors.to_json()
        extra = {
            "step": 1,
            "lineage": "a",
            "cursors": cursors,
            "periodic": False,
            "plan": self.plan.dumps(),
            "loss": 0.0,
        }
        checkpoint.save(self.plan, self.mesh, self.built, Path(folder), extra)

    def close(self):
        self.feed.close()
        close_mesh(self.mesh)


def pass_on(rank, world, host, port, plan_text, load, save, steps):
    """Load a checkpoint (or start anew), train some steps, save; what the rank holds then."""
    made = Rank(rank, world, host, port, plan_text)
    try:
        if load:
            checkpoint.load(made.plan, made.mesh, made.built, Path(load))
        made.train(steps)
        if save:
            made.save(save)
        return made.state()
    finally:
        made.close()


def whole(ranks):
    """Every tensor that the ranks hold together; each part must be the same on all ranks that hold it."""
    found, counted = {}, {}
    for state in ranks:
        for name, (offset, part, shape) in state.items():
            if name not in found:
                found[name], counted[name] = torch.full(shape, torch.nan, dtype=part.dtype), {}
            region = tuple(slice(o, o + n) for o, n in zip(offset, part.shape, strict=True))
            if offset in counted[name]:
                assert torch.equal(found[name][region], part), name
            found[name][region] = part
            counted[name][offset] = part.numel()
    assert not any(tensor.isnan().any() for tensor in found.values())
    return found
