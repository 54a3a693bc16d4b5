"""The benchmarks themselves: every side runs, and ratios are of medians. Nothing is asserted by the clock."""

import pytest
import tensor_parallel
import transports

from mmlab.plan import Plan


@pytest.mark.slow
def test_a_tensor_parallel_step_runs_on_every_side():
    row = tensor_parallel.measure(128, rounds=1, steps=1)
    assert all(row[side] > 0 for side in tensor_parallel.SIDES)


@pytest.mark.slow
def test_whole_steps_run_over_both_transports():
    row = transports.measure(Plan.preset("laptop"), rounds=1, steps=1)
    assert row["ratio"] == row["gloo"] / row["shm"] > 0
