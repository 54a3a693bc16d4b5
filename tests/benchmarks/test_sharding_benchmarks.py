"""The benchmarks of sharding: what they count is what theory says, and all sides run. Nothing is timed."""

import memory
import pytest
import sharding

from mmlab.plan import Plan

SMALL = ("parallel.pp=1", "parallel.dp=2", "data.global_batch=4", "data.seq_len=64", "data.held_out=")
CASES = {
    "zero1": ("parallel.sharding=zero1",),
    "zero2": ("parallel.sharding=zero2", "model.language.tied_embeddings=false"),
    "zero3": ("parallel.sharding=zero3", "sharding.language=module", "parallel.tp=2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_counted_bytes_are_those_of_the_formula(pool, case):
    plan = Plan.load("laptop").with_(*SMALL, *CASES[case])
    pool.grow(plan.world_size)
    found = pool.run(memory.measure_rank, plan.dumps(), 1, ranks=plan.world_size, timeout=90)
    for rank in range(plan.world_size):
        said = memory.theory(plan, rank)
        assert {part: found[rank][part] for part in said} == said
    without = memory.theory(plan.with_("parallel.sharding=none"), plan.world_size - 1)
    assert said["optimizer"] == without["optimizer"] / 2
    assert said["weights"] == without["weights"] / (1 if case == "zero1" else 2)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_side_takes_its_steps():
    rows = sharding.measure("shapes", 1, 1, "model.language.layers=2", "data.global_batch=4")
    assert [row["sharding"] for row in rows] == list(sharding.OURS)
    assert all(min(row["ours"]) > 0 and (row["theirs"] is None or min(row["theirs"]) > 0) for row in rows)
    assert len(sharding.table(rows).splitlines()) == 1 + len(rows)
