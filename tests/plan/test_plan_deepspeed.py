"""DeepSpeed's JSON, made from plans without torch or deepspeed."""

import json
import re

import pytest
from hypothesis import given, settings
from plan_strategies import plans

from mmlab.models.sharding import parameter_specs
from mmlab.plan import Plan, deepspeed
from mmlab.plan.presets import preset_names

ZERO3 = ("parallel.vision=first_stage", "parallel.vision_dp=0", "parallel.sharding=zero3", "parallel.engine=deepspeed")


def sizes(plan, module, dims=0):
    return [s.numel for n, s in parameter_specs(plan).items() if n.startswith(f"{module}.") and len(s.shape) >= dims]


@settings(max_examples=50, deadline=None)
@given(plans())
def test_sizes_are_those_of_the_model(plan):
    for module in deepspeed.KEPT_WHOLE:
        assert deepspeed.largest_parameter(plan, module) == max(sizes(plan, module))
    assert deepspeed.smallest_matrix(plan) == min(sizes(plan, "language", 2))


@pytest.mark.parametrize("name", preset_names())
def test_the_threshold_keeps_what_it_should_and_no_matrix_of_the_decoder(name):
    """The customary 1e5 keeps no matrix of a ViT-L (1 to 4 million elements); this one keeps all or says why not."""
    plan = Plan.preset(name).with_(*ZERO3)
    threshold = deepspeed.config(plan)["zero_optimization"]["stage3_param_persistence_threshold"]
    assert threshold < min(sizes(plan, "language", 2))
    for module in deepspeed.KEPT_WHOLE:
        if module in deepspeed.inside(plan):
            assert max(sizes(plan, module)) <= threshold
        else:
            assert max(sizes(plan, module)) >= min(sizes(plan, "language", 2))
            assert f"{module} stays outside of DeepSpeed" in deepspeed.threshold_reason(plan)


def test_of_llava_the_encoder_is_separable_and_the_projector_is_not():
    plan = Plan.preset("llava-7b").with_(*ZERO3)
    assert deepspeed.inside(plan) == ("vision", "language")
    assert deepspeed.persistence_threshold(plan) == 1024 * 4096


def test_offload_leaves_encoder_and_projector_on_the_device():
    plan = Plan.preset("llava-7b").with_(*ZERO3, "offload.mode=parameters")
    assert deepspeed.inside(plan) == ("language",)
    zero = deepspeed.config(plan)["zero_optimization"]
    assert zero["offload_param"]["device"] == zero["offload_optimizer"]["device"] == "cpu"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_settings_belong_to_their_stage_and_the_batch_adds_up(stage):
    plan = Plan.preset("llava-7b").with_(*ZERO3, f"parallel.sharding=zero{stage}")
    config = deepspeed.config(plan)
    zero = config["zero_optimization"]
    assert zero["stage"] == stage
    assert ("ignore_unused_parameters" in zero) == (stage == 2)
    assert ("stage3_param_persistence_threshold" in zero) == (stage == 3)
    batch = config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"]
    assert batch * plan.parallel.dp == config["train_batch_size"] == plan.data.global_batch


def test_every_value_has_a_comment_and_without_them_it_is_the_json():
    for mode in ("none", "optimizer", "parameters", "nvme"):
        plan = Plan.preset("laptop").with_(*ZERO3, f"offload.mode={mode}")
        text = deepspeed.commented(plan)
        assert json.loads(re.sub(r"  // .*", "", text)) == deepspeed.config(plan)
        for line in text.splitlines():
            assert line.rstrip(",").endswith(("{", "}")) or re.search(r"  // \S", line), line
