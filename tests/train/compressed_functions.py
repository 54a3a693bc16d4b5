"""What ranks of a pool compute in the tests of compressed training."""

import torch
import torch.distributed as dist

from mmlab.data.pipeline import DataSource
from mmlab.parallel.compression.powersgd import handed_over
from mmlab.parallel.mesh import build_mesh, close_mesh
from mmlab.parallel.watch import Watch
from mmlab.plan import Plan
from mmlab.plan.schema import MODULES
from mmlab.train.build import build
from mmlab.train.feed import Feed
from mmlab.train.step import HybridStep, Ride


def weights(rank, world, host, port, plan_text, steps):
    """A rank's weights after each step, by (name, tensor rank), the losses, the bytes of the last step's reductions by
    module, counted over all ranks, and this rank's own as PowerSGD's formula has them."""
    plan = Plan.loads(plan_text)
    mesh = build_mesh(plan, plan.layout(), rank, dist.TCPStore(host, port, is_master=False), torch.device("cpu"))
    built = build(plan, mesh)
    feed = Feed(plan, mesh, DataSource(plan))
    runner = HybridStep(plan, mesh, built, Watch())
    found, losses = [], []
    try:
        feed.reset(feed.cursors, 0)
        for step in range(1, steps + 1):
            runner.configure(plan, step)
            batch = feed.batch()
            result = runner.train(plan, step, batch, Ride(next_bad=feed.next_bad, next_size=plan.data.global_batch))
            feed.agree(result.next_bad)
            losses.append(result.loss)
            found.append({(t.name, mesh.place.tp): t.value.clone() for t in built.trained})
        formula = dict.fromkeys(MODULES, 0)
        for bucket in built.reducer.packed:
            settings, wire = built.reducer.settings[bucket.module], built.reducer.wires.get(bucket.module)
            if wire is not None:
                formula[bucket.module] += handed_over(bucket.shapes, settings, bucket.flat.dtype, wire)
        counted = {module: sum(result.reported.traffic.get(module, [])) for module in MODULES}
    finally:
        feed.close()
        close_mesh(mesh)
    return {"weights": found, "losses": losses, "formula": formula, "counted": counted}
