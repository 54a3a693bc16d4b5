"""What parameters a plan's model has: global names, shapes, initial values and tensor-parallel dims, as data. No torch.

Names and shapes follow the Hugging Face classes (SiglipVisionModel, CLIPVisionModel, LlamaForCausalLM,
Qwen2ForCausalLM; the projector LLaVA's), below one prefix for each module: `vision.`, `projector.`, `language.`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod

from mmlab.plan import lora
from mmlab.plan.schema import MODULES, LanguageConfig, ModuleTrain, Plan, VisionConfig

VISION = "vision.vision_model."
PROJECTOR = "projector."
LANGUAGE = "language."
EMBED_TOKENS = LANGUAGE + "model.embed_tokens.weight"
LM_HEAD = LANGUAGE + "lm_head.weight"
FINAL_NORM = LANGUAGE + "model.norm.weight"
LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
"""What follows the name of a layer in the names of its adapter's factors (PEFT's names)."""
_ATTENTION, _MLP = LANGUAGE + "model.layers.*.self_attn.", LANGUAGE + "model.layers.*.mlp."

TP_DIMS: tuple[tuple[str, int], ...] = (
    (EMBED_TOKENS, 0),
    (LM_HEAD, 0),
    (_ATTENTION + "[qkv]_proj.weight", 0),
    (_ATTENTION + "[qkv]_proj.bias", 0),
    (_ATTENTION + "[qkv]_proj.lora_B.weight", 0),
    (_ATTENTION + "o_proj.weight", 1),
    (_ATTENTION + "o_proj.lora_A.weight", 1),
    (_MLP + "gate_proj.weight", 0),
    (_MLP + "gate_proj.lora_B.weight", 0),
    (_MLP + "up_proj.weight", 0),
    (_MLP + "up_proj.lora_B.weight", 0),
    (_MLP + "down_proj.weight", 1),
    (_MLP + "down_proj.lora_A.weight", 1),
)
"""Name pattern -> tensor dim that tensor parallelism splits; what matches nothing is replicated."""


@dataclass(frozen=True)
class ParameterSpec:
    """One parameter of the model, whole (not one rank's shard)."""

    shape: tuple[int, ...]
    """Global shape, in elements."""
    init: str
    """"normal", "ones" or "zeros"."""
    std: float = 0.0
    """Standard deviation of "normal", in units of the weight."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)


def tp_dim(name: str) -> int | None:
    """The tensor dim of parameter `name` that tensor parallelism splits; None means replicated."""
    return next((dim for pattern, dim in TP_DIMS if fnmatchcase(name, pattern)), None)


def partial_over_tp(name: str) -> bool:
    """Whether each tensor-parallel rank computes only a share of the gradient of a replicated parameter.

    So it is for the whole factor of an adapter: a column-parallel layer's A [r, I] meets just this rank's rows of B, a
    row-parallel layer's B [O, r] just this rank's columns of A x. All other replicated parameters (norms) act on what
    is the same on every rank.
    """
    return name.startswith(LANGUAGE) and name.endswith((LORA_A, LORA_B)) and tp_dim(name) is None


def trains(plan: Plan, name: str) -> bool:
    """Whether a parameter trains: its module is not frozen, and with LoRA it is an adapter's."""
    own: ModuleTrain = getattr(plan.train, name.partition(".")[0])
    return not own.frozen and (own.lora_rank == 0 or name.endswith((LORA_A, LORA_B)))


def parameter_specs(plan: Plan) -> dict[str, ParameterSpec]:
    """All parameters of the plan's model by global name, in the order data flows through them."""
    model = plan.model
    specs = dict(_vision(model.vision))
    width = model.projector.hidden or model.language.hidden
    specs |= dict(_linear(PROJECTOR + "linear_1", width, model.vision.hidden))
    specs |= dict(_linear(PROJECTOR + "linear_2", model.language.hidden, width))
    return dict(_with_adapters(plan, specs | dict(_language(model.language))))


def parameter_shapes(plan: Plan) -> dict[str, tuple[int, ...]]:
    """Global shapes of all parameters of the plan's model by global name."""
    return {name: spec.shape for name, spec in parameter_specs(plan).items()}


Named = Iterator[tuple[str, ParameterSpec]]


def _linear(name: str, out: int, inp: int, *, bias: bool = True, gain: float = 1.0) -> Named:
    """A linear layer [out, inp] that keeps the scale of its input, times `gain`."""
    yield f"{name}.weight", ParameterSpec((out, inp), "normal", gain * inp**-0.5)
    if bias:
        yield f"{name}.bias", ParameterSpec((out,), "zeros")


def _with_adapters(plan: Plan, specs: dict[str, ParameterSpec]) -> Named:
    """Each parameter, and after a weight that has an adapter its factors."""
    chosen = {module: lora.targets(plan, module) for module in MODULES}
    for name, spec in specs.items():
        yield name, spec
        module, layer = name.partition(".")[0], name.removesuffix(".weight")
        if layer != name and layer.rpartition(".")[2] in chosen[module]:
            (out, inp), rank = spec.shape, getattr(plan.train, module).lora_rank
            # The variance of PEFT's default, a uniform distribution within inp^-0.5.
            yield layer + LORA_A, ParameterSpec((rank, inp), "normal", (3 * inp) ** -0.5)
            yield layer + LORA_B, ParameterSpec((out, rank), "zeros")


def _norm(name: str, width: int, *, bias: bool = True) -> Named:
    yield f"{name}.weight", ParameterSpec((width,), "ones")
    if bias:
        yield f"{name}.bias", ParameterSpec((width,), "zeros")


def _vision(config: VisionConfig) -> Named:
    width, clip = config.hidden, config.family == "clip"
    embeddings = VISION + "embeddings."
    pixels = 3 * config.patch_size**2
    if clip:
        yield embeddings + "class_embedding", ParameterSpec((width,), "normal", width**-0.5)
    shape = (width, 3, config.patch_size, config.patch_size)
    yield embeddings + "patch_embedding.weight", ParameterSpec(shape, "normal", pixels**-0.5)
    if not clip:
        yield embeddings + "patch_embedding.bias", ParameterSpec((width,), "zeros")
    positions = config.tokens_per_tile + clip
    yield embeddings + "position_embedding.weight", ParameterSpec((positions, width), "normal", width**-0.5)
    if clip:
        yield from _norm(VISION + "pre_layrnorm", width)
    residual = _residual_gain(config.layers)
    for layer in range(config.layers):
        block = f"{VISION}encoder.layers.{layer}."
        yield from _norm(block + "layer_norm1", width)
        for part in "qkv":
            yield from _linear(f"{block}self_attn.{part}_proj", width, width)
        yield from _linear(block + "self_attn.out_proj", width, width, gain=residual)
        yield from _norm(block + "layer_norm2", width)
        yield from _linear(block + "mlp.fc1", config.mlp_width, width)
        yield from _linear(block + "mlp.fc2", width, config.mlp_width, gain=residual)
    if not clip:
        yield from _norm(VISION + "post_layernorm", width)


def _language(config: LanguageConfig) -> Named:
    width, kv_width = config.hidden, config.kv_heads * config.head_dim
    # Rows of length 1: tied embeddings then start with logits of about 1, and the residual stream starts with more than
    # the first blocks add. With the customary 0.02 (for widths in the thousands) the quickstart model, of width 128,
    # had not begun to use its images after 120 steps.
    table = ParameterSpec((config.vocab_size, width), "normal", width**-0.5)
    yield EMBED_TOKENS, table
    residual = _residual_gain(config.layers)
    for layer in range(config.layers):
        block = f"{LANGUAGE}model.layers.{layer}."
        yield from _norm(block + "input_layernorm", width, bias=False)
        for part, out in (("q", width), ("k", kv_width), ("v", kv_width)):
            yield from _linear(f"{block}self_attn.{part}_proj", out, width, bias=config.attention_bias)
        yield from _linear(block + "self_attn.o_proj", width, width, bias=False, gain=residual)
        yield from _norm(block + "post_attention_layernorm", width, bias=False)
        yield from _linear(block + "mlp.gate_proj", config.mlp_width, width, bias=False)
        yield from _linear(block + "mlp.up_proj", config.mlp_width, width, bias=False)
        yield from _linear(block + "mlp.down_proj", width, config.mlp_width, bias=False, gain=residual)
    yield from _norm(FINAL_NORM.removesuffix(".weight"), width, bias=False)
    if not config.tied_embeddings:
        yield LM_HEAD, table


def _residual_gain(layers: int) -> float:
    """Scale of what each half block adds to the residual stream.

    1 / (2 layers): all of them together add less than the embeddings hold. GPT-2's root of it (section 2.3) let the
    first blocks drown the embeddings and learned more slowly (held-out loss 2.38 against 2.31, 120 quickstart steps).
    """
    return 1.0 / (2 * max(layers, 1))
