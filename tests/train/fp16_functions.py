"""What tests of fp16 run in rank processes."""

from unittest.mock import patch

from mmlab.models import vit
from mmlab.train.job import Job
from mmlab.train.precision import LossScale
from mmlab.train.verify import run_ranks
from mmlab.train.worker import run_worker


def overflowing(rank, world, host, port, run_dir, restore, at_rank, at_steps):
    """A run in which gradients of the encoder leave fp16's range in some steps, on one rank alone."""
    now = {"step": 0}
    forward = vit.MLP.forward

    def fault(at, step, phase):
        now["step"] = step

    def huge(self, hidden):
        out = forward(self, hidden)
        if rank == at_rank and now["step"] in at_steps and out.requires_grad:
            out.register_hook(lambda grad: grad * 60000.0 * 60000.0)
        return out

    with patch.object(vit.MLP, "forward", huge):
        return run_worker(Job(run_dir, rank, world, host, port, 1, restore), fault)


def scaled_in_float64(rank, world, host, port, plan_text, folder):
    """`run_ranks` with a loss scale that the plan, of float64, would not have."""

    class Scaled(LossScale):
        def __init__(self, plan):
            super().__init__(plan)
            self.active, self.value = True, 2.0**12

    with patch("mmlab.train.step.LossScale", Scaled):
        run_ranks(rank, world, host, port, plan_text, 3, folder)
