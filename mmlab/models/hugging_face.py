"""What Hugging Face's config.json says of a model, and whether a plan says the same. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mmlab.plan import lora
from mmlab.plan.schema import Plan

SECTIONS = {"vision": ("vision_config",), "language": ("text_config", "llm_config"), "projector": ()}
"""Where a config of a larger model keeps that of the module."""
FIELDS = {
    "vision": {
        "num_attention_heads": "model.vision.heads",
        "layer_norm_eps": "model.vision.norm_eps",
        "image_size": "model.vision.image_size",
        "patch_size": "model.vision.patch_size",
        "hidden_act": "model.vision.family",
    },
    "language": {
        "num_attention_heads": "model.language.heads",
        "num_key_value_heads": "model.language.kv_heads",
        "rms_norm_eps": "model.language.norm_eps",
        "rope_theta": "model.language.rope_theta",
        "sliding_window": "model.language.attention_window",
        "hidden_act": "",
    },
    "projector": {},
}
"""Keys that shapes do not show but the computation depends on, and the plan's field for each ("": fixed in mmlab)."""


def config_of(plan: Plan, module: str) -> dict[str, Any]:
    """config.json of the Hugging Face class with the module's names: for `vision` or `language`."""
    return _vision(plan) if module == "vision" else _language(plan)


def adapter_config(plan: Plan, module: str) -> dict[str, Any]:
    """PEFT's adapter_config.json of a module with LoRA."""
    own = lora.settings(plan, module)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if module == "language" else None,
        "base_model_name_or_path": own.init_from or None,
        "r": own.lora_rank,
        "lora_alpha": own.lora_alpha,
        "lora_dropout": 0.0,
        "target_modules": list(lora.targets(plan, module)),
        "bias": "none",
        "fan_in_fan_out": False,
        "use_rslora": False,
        "use_dora": False,
        "modules_to_save": None,
        "inference_mode": True,
    }


def config_differences(plan: Plan, module: str, file: Path) -> list[str]:
    """What a checkpoint's config.json says otherwise than the plan, one readable phrase each; no file, none."""
    try:
        config = json.loads(file.read_text())
    except OSError:
        return []
    except ValueError:
        return ["it is not JSON"]
    if not isinstance(config, dict) or not FIELDS[module]:
        return []
    config = next((config[name] for name in SECTIONS[module] if isinstance(config.get(name), dict)), config)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    said = rope | {key: value for key, value in config.items() if value is not None}
    if not said.get("use_sliding_window", True):  # Qwen2 names a window that it does not use
        said["sliding_window"] = 0
    ours = config_of(plan, module)
    differences = [
        f"{key} is {said[key]}, the plan has {field + ' = ' if field else ''}{ours.get(key, 0)}"
        for key, field in FIELDS[module].items()
        if key in said and said[key] != ours.get(key, 0)
    ]
    kind = rope.get("rope_type", rope.get("type", "default"))
    return differences + ([f"rotary positions of type {kind} are not supported"] if kind != "default" else [])


def _vision(plan: Plan) -> dict[str, Any]:
    """SiglipVisionModel (without pooling head) or CLIPVisionModel."""
    vision, siglip = plan.model.vision, plan.model.vision.family == "siglip"
    return {
        "architectures": ["SiglipVisionModel" if siglip else "CLIPVisionModel"],
        "model_type": "siglip_vision_model" if siglip else "clip_vision_model",
        "hidden_size": vision.hidden,
        "intermediate_size": vision.mlp_width,
        "num_hidden_layers": vision.layers,
        "num_attention_heads": vision.heads,
        "num_channels": 3,
        "image_size": vision.image_size,
        "patch_size": vision.patch_size,
        "hidden_act": "gelu_pytorch_tanh" if siglip else "quick_gelu",
        "layer_norm_eps": vision.norm_eps,
    } | ({"vision_use_head": False} if siglip else {})


def _language(plan: Plan) -> dict[str, Any]:
    """Qwen2ForCausalLM (with attention bias), MistralForCausalLM (with a window) or LlamaForCausalLM."""
    language = plan.model.language
    window = language.attention_window
    kind = "Qwen2" if language.attention_bias else "Mistral" if window else "Llama"
    windowed: dict[str, Any] = {"sliding_window": window} if window else {}
    if window and kind == "Qwen2":
        windowed |= {"use_sliding_window": True, "max_window_layers": 0}
    return windowed | {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": kind.lower(),
        "vocab_size": language.vocab_size,
        "hidden_size": language.hidden,
        "intermediate_size": language.mlp_width,
        "num_hidden_layers": language.layers,
        "num_attention_heads": language.heads,
        "num_key_value_heads": language.kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": language.max_positions,
        "rms_norm_eps": language.norm_eps,
        "rope_theta": language.rope_theta,
        "tie_word_embeddings": language.tied_embeddings,
    }
