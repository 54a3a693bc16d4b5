"""LoRA: what a layer computes, names, sizes, merging, and files that PEFT and Hugging Face classes read."""

import json

import pytest
import torch
import torch.nn.functional as F
from model_helpers import make_plan, make_text
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, SiglipVisionConfig, SiglipVisionModel

from mmlab.errors import CheckpointError
from mmlab.models.adapters import lost_adapters, merged
from mmlab.models.build import plain_model
from mmlab.models.sharding import LORA_A, LORA_B, parameter_specs, partial_over_tp, tp_dim
from mmlab.models.weights import export_adapters, export_weights, init_from
from mmlab.plan import lora
from mmlab.plan.schema import MODULES

EVERYWHERE = {f"train.{module}.lora_rank": rank for module, rank in (("vision", 2), ("projector", 3), ("language", 4))}
ATTENTION = {"train.language.lora_rank": 4, "train.language.lora_targets": ["q_proj", "v_proj"]}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def trained_model(plan, dtype=torch.float32):
    """A model whose adapters are no longer at their start."""
    model = plain_model(plan, dtype)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(LORA_B):
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=dtype) * 0.3)
    return model


def values_of(model):
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def logits(plan, model, dtype):
    text = make_text(plan, (7, 5), images=1)
    pixels = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(3), dtype=dtype)
    return model.language.logits(model.language(text, image_tokens=model.image_tokens(pixels)))


def test_a_layer_computes_what_the_paper_says():
    plan = make_plan(EVERYWHERE | {"train.projector.lora_alpha": 6.0})
    layer = trained_model(plan, torch.float64).projector.linear_1
    x = torch.randn(5, layer.weight.shape[1], dtype=torch.float64)
    change = 6.0 / 3 * (layer.lora_B.weight @ layer.lora_A.weight)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight + change, layer.bias), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("changes", [EVERYWHERE, ATTENTION | {"model.language.attention_bias": True}])
def test_merged_weights_give_the_logits_of_the_adapters(changes, dtype):
    plan = make_plan(changes)
    model = trained_model(plan, dtype)
    base = plain_model(make_plan({key: value for key, value in changes.items() if "lora" not in key}), dtype)
    fresh = logits(plan, base, dtype)
    base.load_state_dict(merged(plan, values_of(model)))
    ours, theirs = logits(plan, model, dtype), logits(plan, base, dtype)
    assert (ours - fresh).norm() / fresh.norm() > 0.01
    assert (ours - theirs).norm() / theirs.norm() < TOLERANCE[dtype]


def test_fresh_adapters_change_nothing_and_alone_train():
    plan = make_plan(EVERYWHERE)
    model = plain_model(plan, torch.float64)
    assert torch.equal(
        logits(plan, model, torch.float64), logits(plan, plain_model(make_plan(), torch.float64), torch.float64)
    )
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == name.endswith((LORA_A, LORA_B))
    model(make_text(plan, images=1), torch.randn(1, 3, 32, 32)).backward()
    for name, parameter in model.named_parameters():
        if name.endswith(LORA_A):
            assert not parameter.grad.any()
            assert parameter.std().item() == pytest.approx((3 * parameter.shape[1]) ** -0.5, rel=0.2)
        if name.endswith(LORA_B):
            assert not parameter.any()
            assert parameter.grad.any()


def test_the_plan_counts_what_the_model_has():
    """Targets, shapes and sizes that the plan computes without torch are those of the model's table."""
    plan = make_plan({"model.projector.hidden": 40} | EVERYWHERE)
    specs = parameter_specs(plan)
    blocks = {"vision": plan.model.vision.layers, "projector": 1, "language": plan.model.language.layers}
    for module in MODULES:
        own = {name: spec for name, spec in specs.items() if name.startswith(f"{module}.")}
        matrices = {
            name.removesuffix(".weight").rpartition(".")[2]: spec.shape
            for name, spec in own.items()
            if name.endswith("_proj.weight") or ".mlp.fc" in name or ".linear_" in name
            if name.endswith(".weight") and ".lora_" not in name
        }
        assert lora.shapes(plan, module) == matrices
        assert set(lora.LINEAR[module]) == matrices.keys()
        factors = [spec.numel for name, spec in own.items() if name.endswith((LORA_A, LORA_B))]
        assert sum(factors) == blocks[module] * lora.parameters(plan, module)
        assert len(factors) == 2 * blocks[module] * len(matrices)


def test_the_factor_that_meets_a_split_side_is_split():
    plan = make_plan(EVERYWHERE)
    for name, spec in parameter_specs(plan).items():
        if not name.endswith((LORA_A, LORA_B)):
            assert not partial_over_tp(name)
            continue
        layer, is_b = name.rsplit(".lora_", 1)[0], name.endswith(LORA_B)
        split = tp_dim(f"{layer}.weight")
        assert tp_dim(name) == (split if split is not None and is_b == (split == 0) else None)
        assert partial_over_tp(name) == (split is not None and tp_dim(name) is None)
        assert spec.shape[1 if is_b else 0] == lora.settings(plan, name.partition(".")[0]).lora_rank
    half = sum(
        spec.numel // 2 if tp_dim(name) is not None else spec.numel
        for name, spec in parameter_specs(plan).items()
        if name.startswith("language.") and name.endswith((LORA_A, LORA_B))
    )
    assert half == plan.model.language.layers * lora.parameters(plan, "language", tp=2)


def test_merged_weights_open_in_hugging_face_classes(tmp_path):
    plan = make_plan(EVERYWHERE)
    model = trained_model(plan)
    assert len(export_weights(tmp_path, plan, values_of(model))) == 5
    decoder, report = AutoModelForCausalLM.from_pretrained(tmp_path / "language", output_loading_info=True)
    assert not any(report.values())
    text = make_text(plan, (7,))
    torch.testing.assert_close(model.language.logits(model.language(text)), decoder(text.input_ids[None]).logits[0])


def test_adapters_alone_are_written_as_peft_names_them(tmp_path):
    """The key format of PEFT's checkpoints: "base_model.model.", the wrapped class's name, "lora_A.weight"."""
    plan = make_plan(ATTENTION | {"train.vision.lora_rank": 2, "train.language.init_from": "base"})
    model = trained_model(plan)
    files = export_adapters(tmp_path, plan, values_of(model))
    assert sorted(str(file.relative_to(tmp_path)) for file in files) == [
        "language/adapter_config.json", "language/adapter_model.safetensors",
        "vision/adapter_config.json", "vision/adapter_model.safetensors",
    ]  # fmt: skip
    tensors = load_file(tmp_path / "language" / "adapter_model.safetensors")
    assert sorted(tensors) == sorted(
        f"base_model.model.model.layers.{layer}.self_attn.{part}_proj.lora_{factor}.weight"
        for layer in range(3)
        for part in "qv"
        for factor in "AB"
    )
    ours = values_of(model)["language.model.layers.1.self_attn.v_proj.lora_B.weight"]
    assert torch.equal(tensors["base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"], ours)
    config = json.loads((tmp_path / "language" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["task_type"], config["r"]) == ("LORA", "CAUSAL_LM", 4)
    assert (config["lora_alpha"], config["target_modules"]) == (16.0, ["q_proj", "v_proj"])
    assert config["base_model_name_or_path"] == "base"
    vision = load_file(tmp_path / "vision" / "adapter_model.safetensors")
    names = {name.removeprefix("base_model.model.").replace(".lora_A", "") for name in vision if ".lora_A." in name}
    assert names <= SiglipVisionModel(SiglipVisionConfig(num_hidden_layers=2, hidden_size=24)).state_dict().keys()


def test_without_adapters_there_is_nothing_to_write(tmp_path):
    with pytest.raises(CheckpointError, match="lora_rank above 0"):
        export_adapters(tmp_path, make_plan(), values_of(plain_model(make_plan())))
    plan = make_plan(ATTENTION)
    values = values_of(plain_model(plan))
    values.pop("language.model.layers.0.self_attn.q_proj.lora_B.weight")
    with pytest.raises(CheckpointError, match=r"q_proj\.lora_B\.weight is missing"):
        export_weights(tmp_path, plan, values)


def test_base_weights_come_in_beside_fresh_adapters(tmp_path):
    base = trained_model(make_plan({"train.seed": 9}))
    export_weights(tmp_path, make_plan(), values_of(base))
    plan = make_plan(ATTENTION | {"train.language.init_from": str(tmp_path / "language")})
    model = plain_model(plan)
    fresh = values_of(plain_model(plan))
    init_from(model, plan)
    for name, value in values_of(model).items():
        if name.startswith("language."):
            assert torch.equal(value, fresh[name] if ".lora_" in name else values_of(base)[name])


def test_adapters_are_not_lost_silently():
    plan = make_plan(ATTENTION)
    assert lost_adapters(plan, make_plan()) == ""
    assert lost_adapters(make_plan(ATTENTION | {"train.language.lora_targets": ["all"]}), plan) == ""
    assert "train.language.lora_rank" in lost_adapters(make_plan(), plan)
    assert "down_proj.lora_A" in lost_adapters(plan, make_plan(ATTENTION | {"train.language.lora_targets": ["all"]}))
    other = make_plan(ATTENTION | {"train.language.lora_alpha": 4.0})
    assert lost_adapters(other, plan) == "has adapters with train.language.lora_alpha = 16: set it so."
