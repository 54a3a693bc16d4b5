"""The benchmark itself: both sides run the same steps, and the ratio is of medians. Nothing is timed."""

import deepspeed_steps
import pytest


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_both_sides_train_the_same_at_every_stage():
    rows = deepspeed_steps.measure(2, 2, 1, ("data.path=shapes",))
    assert [row["stage"] for row in rows] == list(deepspeed_steps.STAGES)
    for row in rows:
        assert row["ratio"] == row["deepspeed"] / row["native"] > 0
        assert row["loss"] < 1e-5
    assert len(deepspeed_steps.table(rows).splitlines()) == 1 + len(rows)
