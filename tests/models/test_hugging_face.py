"""The model equals one that nobody here wrote: Hugging Face's classes with the same weights."""

import pytest
import torch
from model_helpers import make_plan, make_text
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    SiglipVisionConfig,
    SiglipVisionModel,
)

from mmlab.models.build import plain_model

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


def randomise(model: torch.nn.Module) -> None:
    """Random values everywhere, so that no norm or bias is neutral."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)


def copy_into(theirs: torch.nn.Module, ours: torch.nn.Module) -> None:
    """Copy our parameters into theirs by name; theirs may hold more (heads that are no part of our model)."""
    state = theirs.state_dict()
    own = {name: parameter.detach() for name, parameter in ours.named_parameters()}
    assert own.keys() <= state.keys()
    assert all(state[name].shape == value.shape for name, value in own.items())
    theirs.load_state_dict(state | own)


def hugging_face_decoder(plan, ours) -> torch.nn.Module:
    language = plan.model.language
    kind, config = (Qwen2ForCausalLM, Qwen2Config) if language.attention_bias else (LlamaForCausalLM, LlamaConfig)
    windowed = {}
    if language.attention_window:
        windowed["sliding_window"] = language.attention_window
        if language.attention_bias:
            windowed |= {"use_sliding_window": True, "max_window_layers": 0}
        else:
            kind, config = MistralForCausalLM, MistralConfig
    theirs = kind(
        config(
            **windowed,
            vocab_size=language.vocab_size,
            hidden_size=language.hidden,
            num_hidden_layers=language.layers,
            num_attention_heads=language.heads,
            num_key_value_heads=language.kv_heads,
            intermediate_size=language.mlp_width,
            tie_word_embeddings=language.tied_embeddings,
            rms_norm_eps=language.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": language.rope_theta},
        )
    ).eval()
    copy_into(theirs, ours)
    theirs.tie_weights()
    return theirs


@pytest.mark.parametrize("attention_bias", [False, True], ids=["llama", "qwen2"])
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("tied", [False, True])
def test_decoder_equals_llama_and_qwen2_on_packed_and_separate_sequences(attention_bias, kv_heads, tied):
    plan = make_plan(
        {
            "model.language.attention_bias": attention_bias,
            "model.language.kv_heads": kv_heads,
            "model.language.tied_embeddings": tied,
            "model.language.rope_theta": 500.0,
        }
    )
    ours = plain_model(plan).language
    randomise(ours)
    theirs = hugging_face_decoder(plan, ours)
    text = make_text(plan, lengths=(5, 9, 2, 9))
    logits = ours.logits(ours(text))
    loss = ours.loss(ours(text), text.targets)
    loss.backward()
    wanted = torch.cat([theirs(ids.unsqueeze(0)).logits[0] for ids in text.input_ids.split(text.seqlens)])
    torch.testing.assert_close(logits, wanted, **TOLERANCE)
    wanted_loss = torch.nn.functional.cross_entropy(wanted, text.targets, reduction="sum")
    torch.testing.assert_close(loss, wanted_loss, **TOLERANCE)
    wanted_loss.backward()
    grads = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, grads[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention_bias", [False, True], ids=["mistral", "qwen2"])
@pytest.mark.parametrize("window", [1, 4])
def test_windowed_attention_equals_mistral_and_qwen2(attention_bias, window):
    plan = make_plan({"model.language.attention_bias": attention_bias, "model.language.attention_window": window})
    ours = plain_model(plan).language
    randomise(ours)
    theirs = hugging_face_decoder(plan, ours)
    text = make_text(plan, lengths=(5, 9, 2, 12))
    wanted = torch.cat([theirs(ids.unsqueeze(0)).logits[0] for ids in text.input_ids.split(text.seqlens)])
    torch.testing.assert_close(ours.logits(ours(text)), wanted, **TOLERANCE)


@pytest.mark.parametrize("family", ["siglip", "clip"])
def test_encoder_equals_siglip_and_clip(family):
    plan = make_plan({"model.vision.family": family, "model.vision.layers": 3})
    ours = plain_model(plan).vision
    randomise(ours)
    vision = plan.model.vision
    kind, config = {
        "siglip": (SiglipVisionModel, SiglipVisionConfig),
        "clip": (CLIPVisionModel, CLIPVisionConfig),
    }[family]
    theirs = kind(
        config(
            hidden_size=vision.hidden,
            num_hidden_layers=vision.layers,
            num_attention_heads=vision.heads,
            intermediate_size=vision.mlp_width,
            image_size=vision.image_size,
            patch_size=vision.patch_size,
            layer_norm_eps=vision.norm_eps,
        )
    ).eval()
    copy_into(theirs, ours.vision_model)
    pixels = torch.randn(3, 3, 32, 32)
    features, wanted = ours(pixels), theirs(pixels).last_hidden_state
    if family == "clip":
        wanted = wanted[:, 1:]
    torch.testing.assert_close(features, wanted, **TOLERANCE)
    weights = torch.randn_like(wanted)
    (features * weights).sum().backward()
    (wanted * weights).sum().backward()
    grads = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.vision_model.named_parameters():
        # Key biases have a true gradient of zero: what both compute there is rounding.
        torch.testing.assert_close(parameter.grad, grads[name], rtol=1e-4, atol=1e-4)
