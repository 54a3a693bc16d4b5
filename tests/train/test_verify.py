"""Sharded equals plain, in float64 to 1e-9 per tensor: every layout has the loss and gradients of one process."""

import pytest
from plan_files import PLANS, said

from mmlab.cluster.verify import in_precision, verify
from mmlab.errors import MmlabError
from mmlab.plan import Plan


def of_tier(tier):
    return [pytest.param(path, id=path.stem) for path in PLANS if said(path, "tier") == tier]


def check(pool, data, name, *changes):
    plan = Plan.load(str(name)).with_({"data.path": str(data), "data.held_out": ""}, *changes)
    result = verify(plan, pool=pool)
    assert result["max_rel_loss"] <= 1e-9
    assert result["max_rel_grad"] <= 1e-9, result["worst"]
    assert result["max_rel_param"] <= 1e-9, result["worst"]
    assert result["ok"], result["own_precision"]
    assert result["losses"][-1] != result["losses"][0]  # something was trained


@pytest.fixture
def data_sets(shards, text_shards, uneven_shards, shaped_shards):
    return {"mixed": shards, "text": text_shards, "uneven": uneven_shards, "shapes": shaped_shards}


def check_plan(pool, data_sets, path):
    check(pool, data_sets[said(path, "data", "mixed")], path)


@pytest.mark.parametrize("path", of_tier("quick"))
def test_layout_equals_one_process(pool, data_sets, path):
    check_plan(pool, data_sets, path)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("path", of_tier("slow"))
def test_more_layouts_equal_one_process(pool, data_sets, path):
    check_plan(pool, data_sets, path)


def test_every_plan_says_what_it_covers_and_passes_the_rules():
    assert len(of_tier("quick")) + len(of_tier("slow")) == len(PLANS)
    for path in PLANS:
        first = path.read_text().splitlines()[0]
        assert first.startswith("# "), path.name
        assert not first.startswith("# tier"), path.name
        plan = Plan.load(str(path))
        assert plan.name == path.stem
        assert list(plan.check()) == [], path.name
        assert plan.world_size <= 8


def test_steps_of_text_alone(pool, text_shards):
    """Encoder gradients are zero; weight decay applies on the encoder as it does on one process."""
    check(pool, text_shards, "laptop", "train.vision.weight_decay=0.1")


@pytest.mark.slow
def test_a_plan_with_compressors_is_proved_without_them(pool, shards):
    plan = Plan.load("laptop").with_(
        {"data.path": str(shards), "data.held_out": "", "parallel.dp": 2, "communication.language.compressor": "topk"}
    )
    result = verify(plan, steps=2, pool=pool)
    assert result["ok"]
    assert result["compressors_off"] == {"language": "topk"}


def test_another_learning_rate_on_one_side_is_found(pool, shards, tmp_path):
    """The comparison can fail: weights differ from step 1 on, gradients from step 2 on."""
    pool.grow(3)
    plan = in_precision(Plan.load("laptop").with_({"data.path": str(shards), "data.held_out": ""}), "fp64")
    other = plan.with_("train.language.lr=1.001e-3")
    pool.run("mmlab.train.verify:run_ranks", plan.dumps(), 2, str(tmp_path), ranks=3)
    pool.run("mmlab.train.verify:run_reference", other.dumps(), 2, str(tmp_path), ranks=1)
    found = pool.run("mmlab.train.verify:compare", str(tmp_path), str(tmp_path), ranks=1)[0]
    assert found["param"] > 1e-6
    assert found["grad"] > 1e-9
    assert found["grad_at"].endswith("step 2")


def test_what_the_input_is_at_fault_for_is_one_sentence(pool, tmp_path):
    plan = Plan.load("laptop").with_({"data.path": str(tmp_path / "nowhere")})
    with pytest.raises(MmlabError, match="nowhere") as caught:
        verify(plan, pool=pool)
    assert caught.value.exit_code == 1
    assert "Traceback" not in str(caught.value)
