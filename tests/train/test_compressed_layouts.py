"""Compressed gradients in every kind of layout: nothing is lost for good, replicas agree, bytes are as by formula."""

import kept_functions
import pytest
import sharding_functions
import torch
from live import make_plan
from test_kept import compressed, same

EXACT = {f"precision.{module}": "fp64" for module in ("vision", "projector", "language")}
TWO = ("parallel.vision=first_stage", "parallel.vision_dp=0", "parallel.dp=2")
GRID = ("parallel.dp=2", "parallel.tp=2")
LAYOUTS = {
    "data": (*TWO, compressed("onebit", "topk")),
    "tensor": (*GRID, compressed("none", "int8")),
    "sequence parallel": (*GRID, "parallel.sp=true", compressed("none", "powersgd", rank=2)),
    "tied over a pipeline": (
        "parallel.dp=2", "parallel.pp=2", "model.language.tied_embeddings=true", compressed("none", "topk"),
    ),
    "context": ("parallel.cp=2", "parallel.vision_dp=2", compressed("topk", "onebit")),
    "encoder on all ranks": (
        "parallel.vision=all_ranks", "parallel.vision_dp=0", "parallel.pp=2", "parallel.dp=2",
        compressed("int8", "topk"),
    ),
    "projector on the first stage": (*GRID, "parallel.projector=first_stage", compressed("none", "onebit")),
    "interleaved": (
        "parallel.dp=2", "parallel.pp=2", "parallel.schedule=interleaved", "parallel.microbatches=2",
        compressed("none", "powersgd"),
    ),
    "zero bubble": (
        "parallel.dp=2", "parallel.pp=2", "parallel.schedule=zb_h1", "parallel.microbatches=2",
        compressed("none", "int8"),
    ),
    "zero1": (*TWO, "parallel.sharding=zero1", compressed("int8", "powersgd")),
    "zero2": (*TWO, "parallel.sharding=zero2", compressed("powersgd", "onebit")),
    "zero2 and tensor": (*GRID, "parallel.sharding=zero2", compressed("none", "topk", ratio=0.1)),
    "zero2, sequence parallel": (*GRID, "parallel.sharding=zero2", "parallel.sp=true", compressed("none", "int8")),
    "zero2 of all modules": (
        "parallel.dp=3", "parallel.vision_dp=2", "parallel.sharding=zero2", "sharding.vision=layer",
        "sharding.projector=module", compressed("topk", "int8"),
    ),
    "zero2, each microbatch": (
        *TWO, "parallel.sharding=zero2", "sharding.reduce=microbatch", "parallel.microbatches=2",
        compressed("none", "topk"),
    ),
    "zero2 over gloo": (*TWO, "parallel.sharding=zero2", "cluster.collectives=gloo", compressed("int8", "onebit")),
    "zero3": (*TWO, "parallel.sharding=zero3", compressed("onebit", "bf16")),
}  # fmt: skip
CASES = [pytest.param(name, marks=() if name == "data" else pytest.mark.slow) for name in LAYOUTS]


def made(data, *changes):
    base = {"parallel.pp": 1, "data.global_batch": 12, "communication.measure_every": 1, "parallel.vision_dp": 1}
    plan = make_plan(data, base, *changes)
    plan.check().raise_if_any()
    return plan


@pytest.mark.parametrize("layout", CASES)
def test_what_is_left_out_is_kept(pool, shards, layout):
    plan, steps = made(shards, EXACT, *LAYOUTS[layout]), 2
    pool.grow(plan.world_size)
    ranks = pool.run(kept_functions.conserve, plan.dumps(), steps, ranks=plan.world_size, timeout=90)
    assert max(rank["worst"] for rank in ranks)[0] < 1e-12
    sharding_functions.whole([rank["state"] for rank in ranks])  # what several ranks hold is the same on all
    for rank in ranks:
        assert rank["counted"] == rank["expected"]
    for side, module in (("vision", "vision"), ("language", "language")):
        settings = getattr(plan.communication, side)
        coding = [sum(rank["coding"][module][i] for rank in ranks) for i in range(3)]
        feedback = settings.compressor not in ("none", "bf16", "fp16")
        assert any(module in rank["seen"] for rank in ranks) == feedback
        assert (coding[0] > 0) == feedback
        assert (0 < coding[1] < 4 * coding[2]) == (settings.compressor != "none")


@pytest.mark.slow
@pytest.mark.parametrize("sharding", ["none", "zero2"])
def test_a_step_that_overflows_leaves_what_is_kept(pool, shards, sharding):
    half = {f"precision.{module}": "fp16" for module in ("vision", "projector", "language")}
    plan = made(shards, half, *TWO, compressed("topk", "int8"), {"parallel.sharding": sharding})
    for first, second, third in pool.run(kept_functions.overflow, plan.dumps(), ranks=2, timeout=90):
        same(first[0], second[0])
        assert all(torch.equal(second[1][name], value) for name, value in first[1].items())
        assert not any(torch.equal(a[3], b[3]) for a, b in zip(second[0], third[0], strict=True) if "weight" in a[0])
        assert all(value.isfinite().all() for value in third[1].values())


COMPRESSORS = ("topk", "none", "powersgd", "bf16", "onebit", "int8", "fp16")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("sharding", ["none", "zero2"])
def test_a_hundred_changes_leak_nothing(pool, shards, sharding):
    """Five times through all compressors and all policies for residuals: the fifth time holds what the second held."""
    known = [name for name in COMPRESSORS if not (sharding == "zero2" and name == "powersgd")]
    changes = [compressed(name, name, residual=policy) for policy in ("flush", "keep", "drop") for name in known]
    plan = made(shards, *TWO, {"parallel.sharding": sharding, "communication.measure_every": 0})
    rounds = -(-100 // len(changes))
    ranks = pool.run(kept_functions.toggle, plan.dumps(), rounds, changes, ranks=2, timeout=240)
    for readings, bits, finite, losses in ranks:
        assert finite
        assert losses == ranks[0][3]
        assert sharding == "zero2" or bits == ranks[0][1]
        assert readings[2:] == [readings[1]] * (rounds - 2)
