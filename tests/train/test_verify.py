"""Sharded equals plain, in float64 to 1e-9 per tensor: every layout has the loss and gradients of one process."""

import pytest

from mmlab.cluster.verify import in_precision, verify
from mmlab.errors import MmlabError
from mmlab.plan import Plan

PLANS = {
    "quickstart: six ranks": ("quickstart",),
    "shared memory": ("quickstart", "cluster.collectives=shm"),
    "tensor parallel": ("laptop", "parallel.pp=1", "parallel.tp=2"),
    "pipeline": ("laptop",),
    "data parallel": ("laptop", "parallel.pp=1", "parallel.dp=2"),
    "encoder data parallel": ("laptop", "parallel.pp=1", "parallel.vision_dp=2", "parallel.microbatches=4"),
    "projector only": ("laptop", "train.vision.frozen=true", "train.language.frozen=true"),
    "language only": ("laptop", "train.vision.frozen=true", "train.projector.frozen=true"),
    "projector on the first stage": ("laptop", "parallel.projector=first_stage", "parallel.tp=2", "parallel.pp=1"),
    "untied, grouped, biased, recomputed": (
        "laptop", "model.language.tied_embeddings=false", "model.language.kv_heads=2",
        "model.language.attention_bias=true", "train.activation_checkpointing=true", "train.language.weight_decay=0.1",
    ),
}  # fmt: skip
SLOW = {
    "gpipe, four stages": ("laptop", "parallel.pp=4", "parallel.schedule=gpipe", "parallel.microbatches=4"),
    "tensor parallel 4": ("laptop", "parallel.pp=1", "parallel.tp=4", "parallel.vision_dp=3"),
    "dp 2, pp 2, tp 2": ("quickstart", "parallel.dp=2", "parallel.vision_dp=1"),
    "projector only on the first stage": (
        "laptop", "parallel.projector=first_stage", "train.vision.frozen=true", "train.language.frozen=true",
    ),
    "clip encoder": ("laptop", "model.vision.family=clip"),
}  # fmt: skip


def check(pool, data, name, *changes):
    plan = Plan.load(name).with_({"data.path": str(data), "data.held_out": ""}, *changes)
    result = verify(plan, pool=pool)
    assert result["max_rel_loss"] <= 1e-9
    assert result["max_rel_grad"] <= 1e-9, result["worst"]
    assert result["max_rel_param"] <= 1e-9, result["worst"]
    assert result["ok"], result["own_precision"]
    assert result["losses"][-1] != result["losses"][0]  # something was trained


@pytest.mark.parametrize("case", PLANS)
def test_layout_equals_one_process(pool, shards, case):
    check(pool, shards, *PLANS[case])


def test_steps_of_text_alone(pool, text_shards):
    """Encoder gradients are zero; weight decay applies on the encoder as it does on one process."""
    check(pool, text_shards, "laptop", "train.vision.weight_decay=0.1")


def test_bf16_errs_no_more_than_plain_bf16(pool, shards):
    formats = [f"precision.{module}=bf16" for module in ("vision", "projector", "language")]
    check(pool, shards, "laptop", *formats)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("case", SLOW)
def test_more_layouts_equal_one_process(pool, shards, case):
    check(pool, shards, *SLOW[case])


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
