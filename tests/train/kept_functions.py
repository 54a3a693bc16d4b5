"""What ranks do in the tests of what compression keeps: train, change settings, save, load, say what they hold."""

import torch
from sharding_functions import Rank
from torch.distributed.tensor import DTensor

from mmlab.data.order import Position
from mmlab.parallel.buckets import split_over_tp
from mmlab.plan import set_live
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
        for packed in self.built.reducer.packed:
            residuals = dict(packed.views(packed.kept.residual)) if packed.kept.residual is not None else {}
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


def sums(ranks):
    """The sum of all residuals of each parameter over all ranks, from what each holds."""
    found = {}
    for held in ranks:
        for name, offset, shape, residual, counts, _ in held:
            if residual is not None and counts:
                region = tuple(slice(o, o + n) for o, n in zip(offset, residual.shape, strict=True))
                found.setdefault(name, torch.zeros(shape, dtype=torch.float64))[region] += residual
    return found
