"""The benchmark itself: both sides run the same steps, and the ratio is of medians. Nothing is asserted by the clock."""

import importlib.util
from pathlib import Path

import pytest

SPEC = importlib.util.spec_from_file_location("deepspeed_steps", Path(__file__).with_name("deepspeed.py"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_both_sides_train_the_same_at_every_stage(shards):
    benchmark = importlib.util.module_from_spec(SPEC)
    SPEC.loader.exec_module(benchmark)
    rows = benchmark.measure("laptop", 2, 2, 1, (f"data.path={shards}", "data.held_out="))
    assert [row["stage"] for row in rows] == list(benchmark.STAGES)
    for row in rows:
        assert row["ratio"] == row["deepspeed"] / row["native"] > 0
        assert row["loss"] < 1e-5
    assert len(benchmark.table(rows).splitlines()) == 1 + len(rows)
