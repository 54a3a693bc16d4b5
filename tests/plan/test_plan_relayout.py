"""Which plans a run can go on by."""

import pytest

from mmlab import Plan, PlanError
from mmlab.plan.relayout import differences, relaid


@pytest.fixture
def running():
    return Plan.preset("laptop")


def test_layouts_upkeep_and_live_values_may_change(running):
    new = relaid(running, {"parallel.tp": 2, "train.language.lr": 1e-4, "checkpoint.keep_last": 1, "data.workers": 2})
    assert (new.parallel.tp, new.train.language.lr, new.data.workers) == (2, 1e-4, 2)
    assert differences(running, new).keys() == {
        "parallel.tp", "train.language.lr", "checkpoint.keep_last", "data.workers"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("model.vision.layers", 3, "the weights would be another model's"),
        ("model.language.rope_theta", 5.0, "the weights would be another model's"),
        ("data.sources", ["emoji"], "the samples or their order would be others"),
        ("data.seed", 1, "the samples or their order would be others"),
        ("train.optimizer", "onebit_adam", "it would be another training"),
        ("train.language.lora_rank", 4, "it would be another training"),
        ("cluster.profile", "slurm", "the lab has the engines of another one"),
        ("name", "other", "it is part of the folder's name"),
    ],
)
def test_what_would_make_it_another_run_is_refused_by_name(running, key, value, why):
    with pytest.raises(PlanError) as refused:
        relaid(running, {key: value, "parallel.tp": 2})
    assert key in str(refused.value)
    assert why in str(refused.value)
    assert "parallel.tp" not in str(refused.value)


def test_problems_of_the_new_plan_are_named_with_their_fix(running):
    with pytest.raises(PlanError, match=r"microbatches.*Fix"):
        relaid(running, {"parallel.microbatches": 5})


def test_a_measured_split_is_measured_anew_for_other_stages(running):
    measured = running.with_("parallel.balance=measured", "parallel.layers_per_stage=[3, 1]")
    assert relaid(measured, {"parallel.pp": 4}).parallel.layers_per_stage == ()
    assert relaid(measured, {"parallel.tp": 2}).parallel.layers_per_stage == (3, 1)


def test_nothing_to_change_is_said(running):
    with pytest.raises(PlanError, match="nothing to change"):
        relaid(running, {"parallel.tp": 1})
