"""What ranks of a pool compute in the tests of compressed training."""

from kept_functions import Kept

from mmlab.parallel.compression.powersgd import handed_over
from mmlab.plan.schema import MODULES


def weights(rank, world, host, port, plan_text, steps):
    """A rank's weights after each step, by (name, tensor rank), the losses, and the bytes that it handed to reductions
    of each module in the last step: counted, and as PowerSGD's formula has them."""
    made = Kept(rank, world, host, port, plan_text)
    found = []
    try:
        for _ in range(steps):
            made.mesh.traffic.take()
            made.train(1)
            found.append({(t.name, made.mesh.place.tp): t.value.clone() for t in made.built.trained})
        counted = {module: made.mesh.traffic.bytes[module] for module in MODULES}
        formula, reducer = dict.fromkeys(MODULES, 0), made.built.reducer
        for bucket in reducer.packed:
            wire = reducer.wires.get(bucket.module)
            if wire is not None:
                settings = reducer.settings[bucket.module]
                formula[bucket.module] += handed_over(bucket.shapes, settings, bucket.flat.dtype, wire)
    finally:
        made.close()
    return {"weights": found, "losses": made.losses, "counted": counted, "formula": formula}
