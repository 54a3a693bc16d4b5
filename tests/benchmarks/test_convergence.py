"""The benchmark itself: every side trains, and is compared with the first. No loss is asserted after so few steps."""

import convergence
import pytest

from mmlab.plan import Plan


def test_the_plans_of_all_sides_pass_the_rules():
    plan = Plan.preset("quickstart").with_(*convergence.BASE)
    for overrides in convergence.sides(plan.train.steps).values():
        assert list(plan.with_(*overrides).check()) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_every_side_is_compared_with_the_first():
    sides = {name: convergence.sides(4)[name] for name in ("none", "topk 1 %")}
    plan = Plan.preset("quickstart").with_(*convergence.BASE, "train.steps=4", "train.eval_samples=16")
    dense, topk = convergence.measure(plan, sides, seeds=[3])
    assert dense["against_first"] == dense["held_out_against"] == [1.0]
    assert dense["losses"][0][0] == topk["losses"][0][0]  # before the first update
    assert dense["losses"][0][1:] != topk["losses"][0][1:]
    assert topk["held_out_against"] == [topk["held_out"][0] / dense["held_out"][0]]
    assert dense["bytes"] == pytest.approx(50 * topk["bytes"], rel=0.02)
