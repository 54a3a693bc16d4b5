"""Weights in and out as safetensors under Hugging Face's names.

In: a file or folder (one file, several, or one with an index) of a module alone or of a larger model that contains it,
such as CLIP's two towers or LLaVA. Each rank reads just its own slices. Out: a folder for each module that the Hugging
Face class of the same family opens with `from_pretrained`, with adapters merged; or the adapters alone, as PEFT's
`PeftModel.from_pretrained` opens them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from mmlab.errors import CheckpointError
from mmlab.models.adapters import merged
from mmlab.models.build import PartModel
from mmlab.models.hugging_face import adapter_config, config_differences, config_of
from mmlab.models.sharding import LORA_A, LORA_B, PROJECTOR, VISION, parameter_specs, tp_dim
from mmlab.plan.schema import MODULES, Plan

ROOTS = (
    (VISION, "embeddings.patch_embedding.weight", "vision_model."),
    (PROJECTOR, "linear_1.weight", "multi_modal_projector."),
    ("language.model.", "embed_tokens.weight", "model."),
    ("language.", "lm_head.weight", ""),
)
"""Our prefix, a name below it that any such checkpoint has (it shows the checkpoint's own prefix), prefix written."""
GROWING = ("embed_tokens.weight", "lm_head.weight")
"""Tables that may have more rows in the plan than in a checkpoint: tokens that were added."""
CONFIG = "config.json"
WEIGHTS = "model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTERS = "adapter_model.safetensors"
WRAPPED = "base_model.model."
"""What PEFT's files have before the names of the wrapped model: those of the live class, which since transformers 5
lack the prefix that vision checkpoints keep (read by peft 0.21.2, transformers 5.24)."""


def init_from(model: PartModel, plan: Plan) -> None:
    """Replace the fresh values of the modules that have `train.<module>.init_from` by the weights named there.

    Rows that an embedding table has beyond the checkpoint's (added tokens) keep their fresh values; what the checkpoint
    has beyond the plan's model (pooling heads, a text tower, surplus blocks of an encoder) is ignored.

    Raises:
        CheckpointError: files are missing or damaged, a parameter is missing or has another shape, the config.json
            beside the weights says something else than the plan, or a decoder has more blocks than the plan's.
    """
    for module in MODULES:
        source = getattr(plan.train, module).init_from
        if source and getattr(model, module) is not None:
            _load(model, plan, module, Path(source).expanduser())


def _load(model: PartModel, plan: Plan, module: str, source: Path) -> None:
    field = f"train.{module}.init_from"
    differences = config_differences(plan, module, source / CONFIG)
    if differences:
        raise CheckpointError(f"{field}: {source / CONFIG} does not agree with the plan: " + "; ".join(differences))
    specs = parameter_specs(plan)
    with _open(source, field) as (names, read):
        surplus = f".layers.{plan.model.language.layers}.input_layernorm.weight"
        if module == "language" and any(name.endswith(surplus) for name in names):
            raise CheckpointError(
                f"{field}: {source} has more blocks than the plan; set model.language.layers to the checkpoint's number"
            )
        for name, parameter in model.named_parameters():
            if not name.startswith(f"{module}.") or name.endswith((LORA_A, LORA_B)):
                continue  # adapters start fresh beside the weights
            theirs = _their_name(name, names)
            if theirs is None:
                raise CheckpointError(
                    f"{field}: {source} has no {name.removeprefix(module + '.')}; is it a checkpoint of this family, "
                    f"and do model.{module}'s layers, biases and tied embeddings agree with it?"
                )
            _copy(parameter, name, specs[name].shape, read(theirs), f"{field}: {source}")


def _copy(parameter: Tensor, name: str, shape: tuple[int, ...], source: Any, where: str) -> None:
    """Copy this rank's slice of a tensor of the checkpoint into a parameter."""
    found = tuple(source.get_shape())
    grown = name.endswith(GROWING) and found[1:] == shape[1:] and found[0] < shape[0]
    if found != shape and not grown:
        raise CheckpointError(f"{where} has {name} with shape {list(found)}, the plan's model has {list(shape)}")
    target = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    dim = tp_dim(name)
    with torch.no_grad():
        if dim is None or target.shape == shape:
            values = source[:]
            target[: len(values)].copy_(values)
            return
        assert isinstance(parameter, DTensor)
        width = target.shape[dim]
        start = parameter.device_mesh.get_local_rank() * width
        if dim == 1:
            target.copy_(source[:, start : start + width])
        elif start < found[0]:
            values = source[start : min(start + width, found[0])]
            target[: len(values)].copy_(values)


def _their_name(name: str, names: Mapping[str, Path]) -> str | None:
    """What a checkpoint with tensors `names` calls our parameter `name`; None if it has none."""
    ours, anchor, _ = _root(name)
    rest = name.removeprefix(ours)
    prefixes = sorted((found.removesuffix(anchor) for found in names if _ends_with(found, anchor)), key=len)
    if ours == VISION and len(prefixes) > 1:
        prefixes.sort(key=lambda prefix: "vision" not in prefix)
    return next((prefix + rest for prefix in prefixes if prefix + rest in names), None)


def _root(name: str) -> tuple[str, str, str]:
    return next(root for root in ROOTS if name.startswith(root[0]))


def _ends_with(name: str, suffix: str) -> bool:
    return name == suffix or name.endswith("." + suffix)


@contextmanager
def _open(source: Path, field: str) -> Iterator[tuple[dict[str, Path], Callable[[str], Any]]]:
    """The tensors of a checkpoint: {name: file}, and a function that opens one for reading slices."""
    with ExitStack() as stack:
        try:
            files = {file: stack.enter_context(safe_open(file, framework="pt")) for file in _files(source, field)}
            names = {name: file for file, handle in files.items() for name in handle.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{field}: {source} cannot be read as safetensors: {error}") from None
        yield names, lambda name: files[names[name]].get_slice(name)


def _files(source: Path, field: str) -> list[Path]:
    """The safetensors files of a checkpoint."""
    if source.is_file():
        return [source]
    index = source / f"{WEIGHTS}.index.json"
    if index.is_file():
        try:
            files = sorted({source / name for name in json.loads(index.read_text())["weight_map"].values()})
        except (ValueError, KeyError, AttributeError, TypeError):
            raise CheckpointError(f"{field}: {index} is not an index of safetensors files") from None
    else:
        files = sorted(source.glob("*.safetensors"))
    missing = [file for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(f"{field}: {missing[0]} is missing, which {index.name} names")
    if not files:
        raise CheckpointError(f"{field}: no safetensors file at {source}; give a .safetensors file or its folder")
    return files


def export_weights(folder: Path, plan: Plan, values: Mapping[str, Tensor]) -> list[Path]:
    """Write weights so that Hugging Face classes open them; adapters are merged into the weights.

    Args:
        folder: where to; gets `vision/`, `projector/` and `language/`, each with model.safetensors and, but for the
            projector (which has no Hugging Face class of its own), config.json.
        plan: the model's shapes and families.
        values: whole tensors by global name; modules of which none is given are left out.

    Returns:
        The files written.

    Raises:
        CheckpointError: a module is incomplete or a tensor has another shape than in the plan.
    """
    written = []
    for module in MODULES:
        own = _of_module(plan, module, values)
        if not own:
            continue
        tensors = _their_names(merged(plan, own))
        if module == "vision" and plan.model.vision.family == "clip":
            # The class has this norm of the pooled class token, our model does not: write the neutral one.
            width = plan.model.vision.hidden
            tensors["vision_model.post_layernorm.weight"] = torch.ones(width)
            tensors["vision_model.post_layernorm.bias"] = torch.zeros(width)
        written.append(_write(folder / module / WEIGHTS, tensors))
        if module != "projector":
            written.append(_write_config(folder / module / CONFIG, config_of(plan, module)))
    return written


def export_adapters(folder: Path, plan: Plan, values: Mapping[str, Tensor]) -> list[Path]:
    """Write the adapters alone, in PEFT's layout; arguments, result and errors as those of `export_weights`.

    Each module with adapters gets adapter_config.json and adapter_model.safetensors, to be put on the module's Hugging
    Face class with the base weights. CheckpointError, too, when the plan has no adapters.
    """
    written = []
    for module in MODULES:
        own = _of_module(plan, module, values)
        factors = {name: value for name, value in own.items() if name.endswith((LORA_A, LORA_B))}
        if factors:
            live = {name.removeprefix("vision_model."): value for name, value in _their_names(factors).items()}
            tensors = {WRAPPED + name: value for name, value in live.items()}
            written.append(_write(folder / module / ADAPTERS, tensors))
            written.append(_write_config(folder / module / ADAPTER_CONFIG, adapter_config(plan, module)))
    if not written:
        raise CheckpointError("there are no adapters: no module of the plan has train.<module>.lora_rank above 0")
    return written


def _of_module(plan: Plan, module: str, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A module's tensors of `values`, all of them or none; CheckpointError where one is missing or misshapen."""
    specs = {name: spec for name, spec in parameter_specs(plan).items() if name.startswith(f"{module}.")}
    if not any(name in values for name in specs):
        return {}
    for name, spec in specs.items():
        if name not in values or tuple(values[name].shape) != spec.shape:
            raise CheckpointError(f"{name} is missing or not of the shape {list(spec.shape)} that the plan says")
    return {name: values[name] for name in specs}


def _their_names(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors ready to be written, under Hugging Face's names."""
    named = {}
    for name, value in values.items():
        ours, _, theirs = _root(name)
        named[theirs + name.removeprefix(ours)] = value.detach().contiguous().cpu()
    return named


def _write(file: Path, tensors: dict[str, Tensor]) -> Path:
    """Write a safetensors file, whole or not at all."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.name}.partial")
    save_file(tensors, partial, metadata={"format": "pt"})
    os.replace(partial, file)
    return file


def _write_config(file: Path, config: Mapping[str, Any]) -> Path:
    file.write_text(json.dumps(config, indent=2) + "\n")
    return file
