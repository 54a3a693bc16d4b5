"""A small plan and microbatches for it."""

import torch

from mmlab.data.packed import PackedText, TextSequence, pack
from mmlab.plan.schema import Plan

IMAGE_ID = 3
SMALL = {
    "model.vision.image_size": 32,
    "model.vision.hidden": 48,
    "model.language.vocab_size": 96,
    "model.language.hidden": 64,
    "model.language.layers": 3,
    "model.language.kv_heads": 2,
    "model.language.intermediate": 128,
}


def make_plan(changes: dict[str, object] | None = None) -> Plan:
    """A plan with a small model; `changes` by dotted key."""
    document: dict = {}
    for key, value in (SMALL | (changes or {})).items():
        *sections, name = key.split(".")
        section = document
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = value
    return Plan.model_validate(document)


def make_text(plan: Plan, lengths: tuple[int, ...] = (5, 9, 2), images: int = 0, seed: int = 0) -> PackedText:
    """Sequences of random tokens, the first `images` of them with an image before the text; text is predicted."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for index, length in enumerate(lengths):
        places = plan.model.vision.tokens_per_tile if index < images else 0
        low, high = IMAGE_ID + 1, plan.model.language.vocab_size
        words = torch.randint(low, high, (length + 1,), generator=generator).tolist()
        ids = [IMAGE_ID] * places + words[:-1]
        targets = [-100] * max(places - 1, 0) + words[:1] * bool(places) + words[1:]
        sequences.append(TextSequence(tuple(ids), tuple(targets), f"sample {index}"))
    return pack(sequences, IMAGE_ID)
