"""What ranks of a pool compute in the tests of 1-bit Adam."""

from datetime import timedelta

import torch
import torch.distributed as dist

from mmlab.parallel import shm
from mmlab.parallel.buckets import Trained
from mmlab.parallel.gradients import Reducer
from mmlab.plan import Plan
from mmlab.plan.schema import MODULES
from mmlab.train.build import communication
from mmlab.train.onebit import OnebitAdam

SHAPES = {"language.a": (6, 5), "language.b": (7,), "projector.c": (3, 4)}
STEPS, FREEZE = 7, 3
PLAN = {
    "parallel.dp": 2, "train.optimizer": "onebit_adam", "train.freeze_step": FREEZE, "train.clip_norm": 0.0,
    "train.steps": STEPS, "train.language.lr": 1e-2, "train.language.weight_decay": 0.1, "train.language.beta1": 0.8,
    "parallel.projector": "first_stage",
}  # fmt: skip


def make_plan(**changes) -> Plan:
    return Plan().with_(PLAN | {key.replace("__", "."): value for key, value in changes.items()})


def weights(dtype=torch.float64) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {name: torch.randn(shape, dtype=torch.float64).to(dtype) for name, shape in SHAPES.items()}


def gradients(step: int, rank: int, dtype=torch.float64) -> dict[str, torch.Tensor]:
    """A rank's gradients of a step; the first column of "language.a" has none before the freeze."""
    torch.manual_seed(100 * step + rank)
    found = {name: torch.randn(shape, dtype=torch.float64).to(dtype) for name, shape in SHAPES.items()}
    if step <= FREEZE:
        found["language.a"][:, 0] = 0.0
    return found


class Ranked:
    """Reducer and optimizer of one rank, without a model."""

    def __init__(self, plan, group, dtype=torch.float64, copies=(), scaled=1.0):
        self.plan, self.scaled = plan, scaled
        self.params = {name: torch.nn.Parameter(value) for name, value in weights(dtype).items()}
        trained = [Trained(n, p, p.detach(), n.partition(".")[0], True) for n, p in self.params.items()]
        groups = dict.fromkeys(MODULES, group)
        self.reducer = Reducer(trained, groups, dict.fromkeys(MODULES, 1e6), undoable=scaled != 1.0)
        self.optimizer = OnebitAdam(plan, trained, copies)

    def reduce(self, step, grads):
        self.reducer.configure(communication(self.plan), step)
        self.reducer.set_share(self.optimizer.sharing(self.plan, step))
        self.reducer.unit = self.scaled
        for name, grad in grads.items():
            self.params[name].grad = grad * self.scaled
        self.reducer.finish()
        self.reducer.scale(1.0 / self.scaled)
        return {name: grad.clone() for name, grad in self.reducer.grads.items()}

    def update(self, step):
        self.optimizer.step(self.plan, step, self.reducer.grads)
        return {name: p.detach().clone() for name, p in self.params.items()}


def trajectory(rank, world, host, port, plan_text, backend, dtype, scaled) -> dict:
    """All steps: what each reduced, the weights after it, and the residuals it left."""
    limit = timedelta(seconds=30)
    store = dist.TCPStore(host, port, is_master=False, timeout=limit)
    if backend == "shm":
        shm.register()
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=limit)
    made = Ranked(Plan.loads(plan_text), dist.group.WORLD, dtype, scaled=scaled)
    reduced, held, residuals = [], [], []
    for step in range(1, STEPS + 1):
        reduced.append(made.reduce(step, gradients(step, rank, dtype)))
        held.append(made.update(step))
        kept = {}
        for bucket in [*made.reducer.buckets, *made.reducer.partial]:
            if bucket.kept.residual is not None:
                kept |= {name: value.clone() for name, value in bucket.views(bucket.kept.residual)}
        residuals.append(kept)
    return {"reduced": reduced, "weights": held, "residuals": residuals}
