"""Weights come in from Hugging Face's files and go out to its classes."""

import json

import pytest
import rank_functions
import torch
from model_helpers import make_plan, make_text
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    CLIPVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from mmlab.errors import CheckpointError
from mmlab.models.build import plain_model
from mmlab.models.sharding import parameter_shapes
from mmlab.models.weights import export_weights, init_from


def random_values(plan) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in parameter_shapes(plan).items()}


def loaded(plan):
    model = plain_model(plan)
    init_from(model, plan)
    return model


def with_sources(changes, **sources):
    return make_plan(changes | {f"train.{module}.init_from": str(path) for module, path in sources.items()})


@pytest.fixture
def exported(tmp_path):
    """The small plan's weights as they are written, and the values."""
    values = random_values(make_plan())
    export_weights(tmp_path, make_plan(), values)
    return tmp_path, values


@pytest.mark.parametrize("family", ["siglip", "clip"])
@pytest.mark.parametrize("tied", [True, False])
def test_out_to_hugging_face_classes_and_in_again(tmp_path, family, tied):
    changes = {"model.vision.family": family, "model.language.tied_embeddings": tied, "model.language.rope_theta": 50.0}
    changes["model.language.attention_bias"] = not tied
    values = random_values(make_plan(changes))
    files = export_weights(tmp_path, make_plan(changes), values)
    assert len(files) == 5
    model = loaded(
        with_sources(changes, **{module: tmp_path / module for module in ("vision", "projector", "language")})
    )
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, values[name])
    vision = {"siglip": SiglipVisionModel, "clip": CLIPVisionModel}[family]
    vision, report = vision.from_pretrained(tmp_path / "vision", output_loading_info=True)
    assert not any(report.values())
    pixels = torch.randn(2, 3, 32, 32)
    wanted = vision(pixels).last_hidden_state
    torch.testing.assert_close(model.vision(pixels), wanted if family == "siglip" else wanted[:, 1:])
    decoder, report = AutoModelForCausalLM.from_pretrained(tmp_path / "language", output_loading_info=True)
    assert not any(report.values())
    text = make_text(make_plan(changes), (7,))
    torch.testing.assert_close(model.language.logits(model.language(text)), decoder(text.input_ids[None]).logits[0])


def test_in_from_what_hugging_face_writes_in_several_files(tmp_path):
    language = make_plan().model.language
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=language.vocab_size,
            hidden_size=language.hidden,
            num_hidden_layers=language.layers,
            num_attention_heads=language.heads,
            num_key_value_heads=language.kv_heads,
            intermediate_size=language.mlp_width,
            tie_word_embeddings=True,
        )
    )
    theirs.save_pretrained(tmp_path / "language", max_shard_size="100KB")
    assert len(list((tmp_path / "language").glob("*.safetensors"))) > 2
    vision = SiglipVisionModel(
        SiglipVisionConfig(
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=192,
            image_size=32,
            patch_size=16,
        )
    )
    vision.save_pretrained(tmp_path / "vision")
    model = loaded(with_sources({}, language=tmp_path / "language", vision=tmp_path / "vision"))
    for name, parameter in model.language.named_parameters():
        assert torch.equal(parameter, theirs.state_dict()[name])
    for name, parameter in model.vision.vision_model.named_parameters():
        assert torch.equal(parameter, vision.state_dict()[name])


def test_modules_inside_a_larger_checkpoint_are_found(exported, tmp_path):
    folder, values = exported
    whole = {f"model.vision_tower.{k}": v for k, v in load_file(folder / "vision" / "model.safetensors").items()}
    whole |= {"text_model.embeddings.patch_embedding.weight": torch.zeros(1)}
    whole |= load_file(folder / "projector" / "model.safetensors")
    whole |= {f"language_model.{k}": v for k, v in load_file(folder / "language" / "model.safetensors").items()}
    save_file(whole, tmp_path / "llava.safetensors")
    file = tmp_path / "llava.safetensors"
    for name, parameter in loaded(with_sources({}, vision=file, projector=file, language=file)).named_parameters():
        assert torch.equal(parameter, values[name])


def test_surplus_encoder_blocks_are_ignored_and_added_tokens_stay_fresh(exported):
    folder, values = exported
    changes = {"model.vision.layers": 1, "model.language.vocab_size": 100}
    plan = with_sources(changes, vision=folder / "vision", language=folder / "language")
    fresh, model = plain_model(plan), loaded(plan)
    table = model.language.model.embed_tokens.weight
    assert torch.equal(table[:96], values["language.model.embed_tokens.weight"])
    assert torch.equal(table[96:], fresh.language.model.embed_tokens.weight[96:])
    name = "vision.vision_model.encoder.layers.0.mlp.fc1.weight"
    assert torch.equal(dict(model.named_parameters())[name], values[name])


def test_each_rank_reads_its_slices(exported, pool):
    folder, values = exported
    shards = pool.run(rank_functions.loaded_shards, {"train.language.init_from": str(folder / "language")}, ranks=2)
    for rank, shard in enumerate(shards):
        for name, value in shard.items():
            dim = {"q_proj": 0, "down_proj": 1, "embed_tokens": 0}.get(name.split(".")[-2])
            if dim is not None:
                assert torch.equal(value, values[name].chunk(2, dim)[rank])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.language.hidden": 128}, r"shape \[96, 64\], the plan's model has \[96, 128\]"),
        ({"model.language.layers": 2}, "set model.language.layers to the checkpoint's number"),
        ({"model.language.layers": 4}, "has no model.layers.3.input_layernorm.weight"),
        ({"model.language.tied_embeddings": False}, "has no lm_head.weight"),
        ({"model.language.rope_theta": 7.0}, "rope_theta is 10000.0, the plan has model.language.rope_theta = 7.0"),
        ({"model.language.heads": 2}, "num_attention_heads is 4, the plan has model.language.heads = 2"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(exported, changes, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        loaded(with_sources(changes, language=exported[0] / "language"))
    assert "train.language.init_from" in str(caught.value)


def test_unsupported_rotary_positions_are_refused(exported):
    file = exported[0] / "language" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}))
    with pytest.raises(CheckpointError, match="type llama3 are not supported"):
        loaded(with_sources({}, language=file.parent))


def test_files_that_are_missing_or_damaged_are_named(exported, tmp_path):
    folder = exported[0]
    with pytest.raises(CheckpointError, match=r"train\.vision\.init_from: no safetensors file at .*/nowhere"):
        loaded(with_sources({}, vision=tmp_path / "nowhere"))
    whole = (folder / "vision" / "model.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match=r"cut\.safetensors cannot be read as safetensors"):
        loaded(with_sources({}, vision=tmp_path / "cut.safetensors"))
    (folder / "language" / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(CheckpointError, match=r"gone\.safetensors is missing"):
        loaded(with_sources({}, language=folder / "language"))


def test_incomplete_weights_are_not_written(tmp_path):
    values = random_values(make_plan())
    values.pop("projector.linear_2.bias")
    with pytest.raises(CheckpointError, match=r"projector\.linear_2\.bias is missing"):
        export_weights(tmp_path, make_plan(), values)
