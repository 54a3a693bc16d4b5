"""Plans that come with mmlab: two that train on a laptop, two with the shapes of real models."""

from __future__ import annotations

QUICKSTART = """\
name = "quickstart"

[model.vision]
image_size = 64
patch_size = 16
hidden = 96
layers = 2
heads = 4

[model.language]
vocab_size = 1024
hidden = 128
layers = 4
heads = 4
kv_heads = 4
max_positions = 512

[parallel]
vision = "own_ranks"
vision_dp = 2
dp = 1
tp = 2
pp = 2
schedule = "1f1b"
microbatches = 2

[data]
path = "emoji"
global_batch = 16
seq_len = 64

[train]
steps = 150

[train.vision]
lr = 5e-4
warmup_steps = 5

[train.projector]
lr = 2e-3
warmup_steps = 5

[train.language]
lr = 2e-3
weight_decay = 0.01
warmup_steps = 5

[checkpoint]
every_steps = 50
"""
"""Six ranks on two cores: every strategy that this version has, at work. Admits tp, pp and dp up to 4."""

LAPTOP = (
    QUICKSTART.replace('name = "quickstart"', 'name = "laptop"')
    .replace("vision_dp = 2", "vision_dp = 1")
    .replace("tp = 2", "tp = 1")
)
"""Three ranks: one encodes, two are the stages of the language model."""

LLAVA_7B = """\
# LLaVA-1.5-7B (Liu et al. 2023): CLIP ViT-L/14 at 336 pixels, two-layer projector, Vicuna-7B. Projector and language
# model train, the encoder stays as it is (second stage of LLaVA's recipe). LLaVA reads the encoder's last layer but
# one, so 23 of its 24 layers are computed.
name = "llava-7b"

[model.vision]
family = "clip"
image_size = 336
patch_size = 14
hidden = 1024
layers = 23
heads = 16
intermediate = 4096
norm_eps = 1e-5

[model.language]
vocab_size = 32064
hidden = 4096
layers = 32
heads = 32
kv_heads = 32
intermediate = 11008
tied_embeddings = false
norm_eps = 1e-5
max_positions = 4096

[parallel]
vision = "own_ranks"
vision_dp = 2
dp = 1
tp = 2
pp = 3
schedule = "1f1b"
microbatches = 16

[precision]
vision = "bf16"
projector = "bf16"
language = "bf16"

[data]
global_batch = 128
seq_len = 2048
workers = 4

[train]
steps = 5197
activation_checkpointing = true

[train.vision]
frozen = true

[train.projector]
lr = 2e-5
warmup_steps = 156

[train.language]
lr = 2e-5
warmup_steps = 156

[checkpoint]
every_steps = 500

[cluster]
ranks_per_node = 8
"""
"""The shapes of LLaVA-1.5-7B on one node of eight ranks."""

VLM_70B = """\
# SigLIP-so400m/14 beside Llama-3-70B. tp is 4 so that the four encoder ranks share node 0 with the first stage: image
# tokens of the first replica never leave the node. 378 pixels are the 27 patches of 14 that the published 384 uses.
name = "vlm-70b"

[model.vision]
family = "siglip"
image_size = 378
patch_size = 14
hidden = 1152
layers = 27
heads = 16
intermediate = 4304

[model.language]
vocab_size = 128256
hidden = 8192
layers = 80
heads = 64
kv_heads = 8
intermediate = 28672
tied_embeddings = false
rope_theta = 500000.0
norm_eps = 1e-5
max_positions = 8192

[parallel]
vision = "own_ranks"
vision_dp = 4
dp = 2
tp = 4
pp = 10
schedule = "1f1b"
microbatches = 32

[precision]
vision = "bf16"
projector = "bf16"
language = "bf16"

[data]
global_batch = 256
seq_len = 4096
lanes = 64
workers = 4

[train]
steps = 10000
activation_checkpointing = true

[train.vision]
lr = 2e-6
warmup_steps = 300

[train.projector]
lr = 1e-5
warmup_steps = 300

[train.language]
lr = 1e-5
weight_decay = 0.1
warmup_steps = 300

[checkpoint]
every_steps = 250

[cluster]
ranks_per_node = 8
"""
"""A 70-billion language model with its encoder: 84 ranks on 11 nodes."""

_TEXTS = {"quickstart": QUICKSTART, "laptop": LAPTOP, "llava-7b": LLAVA_7B, "vlm-70b": VLM_70B}


def preset_names() -> list[str]:
    """Names that `Plan.load` and `mmlab new` take."""
    return list(_TEXTS)


def preset_text(name: str) -> str:
    """The TOML of a preset. KeyError on an unknown name."""
    return _TEXTS[name]
