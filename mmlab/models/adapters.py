"""Low-rank adapters (LoRA, Hu et al. 2021) of a model's linear layers: adding them, merging them into the weights.

Names are PEFT's: `<layer>.lora_A.weight` [r, I] and `<layer>.lora_B.weight` [O, r]; B starts at zero, so a fresh
adapter changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from mmlab.models.initial import MakeParameter
from mmlab.models.layers import Linear
from mmlab.models.sharding import LORA_A, LORA_B, parameter_specs
from mmlab.plan import lora
from mmlab.plan.schema import MODULES, Plan


def adapt(model: nn.Module, plan: Plan, make: MakeParameter) -> None:
    """Give the linear layers that the plan names an adapter; `model` has a child for each module that it holds."""
    chosen = {module: (lora.targets(plan, module), module) for module in MODULES}
    for name, layer in model.named_modules():
        names, module = chosen.get(name.partition(".")[0], ((), ""))
        if isinstance(layer, Linear) and name.rpartition(".")[2] in names:
            layer.adapt(make, name, lora.scale(plan, module))


def merged(plan: Plan, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors by global name with W + (alpha / r) B A in the place of W and its factors.

    The product is taken in float64 and rounded once to the weight's own format.
    """
    found = {name: value for name, value in values.items() if not name.endswith((LORA_A, LORA_B))}
    for name, a in values.items():
        if not name.endswith(LORA_A):
            continue
        layer = name.removesuffix(LORA_A)
        weight, b = values[f"{layer}.weight"], values[layer + LORA_B]
        scale = lora.scale(plan, name.partition(".")[0])
        found[f"{layer}.weight"] = (weight.double() + scale * (b.double() @ a.double())).to(weight.dtype)
    return found


def lost_adapters(plan: Plan, saved: Plan) -> str:
    """Why `plan` cannot take over what a checkpoint of `saved` has learned in adapters; "" when it can.

    Leaving an adapter out, or scaling it otherwise, would silently make another model.
    """
    lost = sorted(parameter_specs(saved).keys() - parameter_specs(plan).keys())
    lost = [name for name in lost if name.endswith((LORA_A, LORA_B))]
    if lost:
        return (
            f"has an adapter that the plan does not have, {lost[0]}: set train.{lost[0].partition('.')[0]}.lora_rank "
            "and lora_targets as they were, or start from its merged weights (`mmlab export`, init_from)."
        )
    for module in MODULES:
        if lora.targets(saved, module) and lora.scale(plan, module) != lora.scale(saved, module):
            alpha = lora.settings(saved, module).lora_alpha
            return f"has adapters with train.{module}.lora_alpha = {alpha:g}: set it so."
    return ""
