"""The [data] section: which samples, in which order, and how they become batches."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mmlab.plan.section import Names, Section, Shares

Backend = Literal["pillow", "dali"]


class DataConfig(Section):
    """Which samples, in which order, cut to which length."""

    path: str = "emoji"
    """Folder of shards, a brace pattern such as "shards/train-{000000..000009}.tar", or a built-in set
    ("emoji", "shapes"), which is made on first use in the data cache (a folder of that name is "./emoji"). Also
    remote: "https://host/train-{000000..000009}.tar", "s3://bucket/prefix-{0..3}.tar", "pipe:COMMAND", or the address
    of a folder that `mmlab data pack` made."""
    sources: Names = ()
    """Several sources to mix, each as data.path would name it; they then take its place."""
    weights: Shares = ()
    """Share of the samples that comes from each of data.sources, to any scale; empty means by size. Each source begins
    anew when it is used up, so a small one with a large share comes more often."""
    shuffle_window: int = Field(0, ge=0)
    """Samples of the mixed order that are shuffled among each other; 0 means none. Chunks of neighbouring samples are
    shuffled in any case, and the order inside of each."""
    text_share: float = Field(0.0, ge=0, lt=1)
    """Share of text-only samples in every step, as near as whole samples allow, where sources hold both kinds; both
    are then walked apart, each with epochs of its own. 0 leaves them as they come."""
    bucket_window: int = Field(0, ge=0)
    """Samples of the order that are regrouped so that the steps among them, and the microbatches of each, have about
    the same number of tokens and tiles; a multiple of data.global_batch, 0 means none."""
    token_budget: int = Field(0, ge=0)
    """Tokens of a microbatch at most, image tokens included: samples of a step are dealt to its microbatches so that
    none has more where that can be (a larger data.bucket_window helps), and its event says by how many where not. 0
    means no limit."""
    held_out: str = ""
    """Shards for evaluation; empty means the built-in set's own held-out split, or none."""
    tokenizer: str = ""
    """A Hugging Face tokenizer.json; empty means the one beside the shards."""
    global_batch: int = Field(16, ge=1)
    """Samples a step: dp x microbatches x microbatch size."""
    seq_len: int = Field(128, ge=2)
    """Longest sample, in tokens with image tokens expanded; longer text is cut at its end."""
    max_tiles: int = Field(1, ge=1, le=64)
    """Tiles that a picture is cut into at most, in the grid closest to its shape; 1 resizes it to one. A sample whose
    text leaves less room in data.seq_len has fewer."""
    thumbnail: bool = True
    """Whether a picture cut into several tiles is also seen whole, as one more tile behind them."""
    cache_mb: int = Field(20_000, ge=64)
    """Megabytes (1e6 bytes) of the disk that blocks of remote shards may take on a host, in the data cache."""
    lanes: int = Field(8, ge=1)
    """Fixed walks through the shards; part of the order of samples, independent of the layout."""
    seed: int = Field(0, ge=0)
    """Seed of the order of samples, dimensionless."""
    workers: int = Field(0, ge=0)
    """Spawned decode processes for each rank that decodes; 0 decodes in a thread."""
    backend: Backend = "pillow"
    """What decodes images: "pillow", or NVIDIA's "dali" (JPEG alone, with data.workers threads, on CUDA by the GPU; the
    rest, and what an evaluation shows, by Pillow)."""
    prefetch: int = Field(2, ge=1)
    """Steps whose images are decoded ahead on each rank that decodes; they wait in memory with a byte a pixel and
    channel."""
    max_bad_share: float = Field(0.05, ge=0, le=1)
    """Share of undecodable images (of those seen so far, after the first 100) above which the run stops."""
