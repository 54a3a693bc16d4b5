"""Training with compressed gradients: every rank ends each step with the same bits, whatever the layout."""

import compressed_functions
import pytest
import torch
from live import make_plan

from mmlab.plan.schema import MODULES

SMALL = (
    "parallel.pp=1",
    "data.global_batch=8",
    "communication.vision.bucket_mb=0.2",
    "communication.language.bucket_mb=0.2",
)
LAYOUTS = {
    "copies": ("parallel.vision=first_stage", "parallel.vision_dp=0", "parallel.dp=2"),
    "four copies": ("parallel.vision=first_stage", "parallel.vision_dp=0", "parallel.dp=4"),
    "tensor": ("parallel.vision=first_stage", "parallel.vision_dp=0", "parallel.dp=2", "parallel.tp=2"),
    "sequence parallel": ("parallel.vision_dp=2", "parallel.dp=2", "parallel.tp=2", "parallel.sp=true"),
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_end_each_step_with_equal_weights(pool, shards, layout):
    changes = [
        f"communication.{group}.{setting}"
        for group in ("vision", "language")
        for setting in ("compressor=powersgd", "min_compression_rate=1.0", "rank=2")
    ]
    plan = make_plan(shards, *SMALL, *LAYOUTS[layout], *changes)
    plan.check().raise_if_any()
    pool.grow(plan.world_size)
    first = {}
    for collectives in ("gloo", "auto"):
        own = plan.with_(f"cluster.collectives={collectives}")
        results = pool.run(compressed_functions.weights, own.dumps(), 3, ranks=plan.world_size, timeout=120)
        if plan.world_size > 2:  # norms and losses are summed in another order then
            first = {}
        for step in range(3):
            for result in results:
                for key, value in result["weights"][step].items():
                    assert torch.equal(first.setdefault((step, key), value), value), (collectives, step, key)
        assert all(result["losses"] == results[0]["losses"] for result in results)
        for result in results:
            assert result["counted"] == result["formula"]
        for module in MODULES:
            counted = sum(result["counted"][module] for result in results)
            held = [v for r in results for (name, _), v in r["weights"][0].items() if name.startswith(module)]
            assert 0 < counted < 4 * sum(v.numel() for v in held) / 3
