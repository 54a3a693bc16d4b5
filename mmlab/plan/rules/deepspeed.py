"""What DeepSpeed cannot be combined with, and what its offload needs."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from ctypes.util import find_library

from mmlab.plan import deepspeed
from mmlab.plan.keys import get
from mmlab.plan.problems import Fix, Problem
from mmlab.plan.schema import MODULES, Plan

NEEDED: tuple[tuple[str, object, str], ...] = (
    ("parallel.tp", 1, "the whole model is on every rank"),
    ("parallel.pp", 1, "the whole model is on every rank"),
    ("parallel.cp", 1, "the whole model is on every rank"),
    ("parallel.sp", False, "there is no tensor group to split sequences over"),
    ("parallel.schedule", "1f1b", "each microbatch goes forward and backward before the next"),
    ("sharding.language", "layer", "DeepSpeed gathers module by module"),
    ("parallel.encoder_batch", 1, "images are encoded with the text of their microbatch"),
    ("train.optimizer", "adamw", "DeepSpeed 0.19.8 has no 1-bit Adam (it refuses the name)"),
    ("communication.vision.compressor", "none", "DeepSpeed reduces gradients itself"),
    ("communication.language.compressor", "none", "DeepSpeed reduces gradients itself"),
)
"""What every plan under DeepSpeed has: (field, value, why)."""
NATIVE = ("parallel.engine=native", "parallel.sharding=none", "offload.mode=none")
"""The way back from DeepSpeed."""


def layout(plan: Plan) -> Iterator[Problem]:
    """DeepSpeed runs the whole model on every rank: data parallelism alone, images encoded where their text is."""
    if plan.parallel.engine != "deepspeed":
        return
    if importlib.util.find_spec("deepspeed") is None:
        message = "deepspeed is not installed here (it is installed with mmlab on Linux)."
        yield Problem("parallel.engine", message, Fix("use the native engine", NATIVE))
    if plan.parallel.vision != "first_stage":
        message = f'engine = "deepspeed" encodes images on the rank of their text; vision = "{plan.parallel.vision}"'
        fix = Fix("merge the encoder with it", ("parallel.vision=first_stage", "parallel.vision_dp=0"))
        yield Problem("parallel.vision", f"{message} spreads them over others.", fix)
    for field, value, why in NEEDED:
        if get(plan, field) != value:
            shown = str(value).lower() if isinstance(value, bool) else value
            message = f'engine = "deepspeed" needs {shown}: {why}.'
            yield Problem(field, message, Fix(f"use {shown}", (f"{field}={shown}",)))


def sharding(plan: Plan) -> Iterator[Problem]:
    """DeepSpeed is here for ZeRO, and needs something to train."""
    p = plan.parallel
    if p.engine != "deepspeed":
        return
    if p.sharding == "none":
        message = 'engine = "deepspeed" runs ZeRO 1, 2 or 3; without sharding the native engine does the same.'
        yield Problem("parallel.sharding", message, Fix("shard the optimizer", ("parallel.sharding=zero1",)))
    elif all(getattr(plan.train, module).frozen for module in deepspeed.inside(plan)):
        held = " and ".join(deepspeed.inside(plan))
        message = f"all that DeepSpeed would hold ({held}) is frozen; {deepspeed.threshold_reason(plan)}."
        yield Problem("parallel.engine", message, Fix("use the native engine", NATIVE))


def precision(plan: Plan) -> Iterator[Problem]:
    """mmlab's loss scaling is not DeepSpeed's."""
    if plan.parallel.engine != "deepspeed":
        return
    for module in MODULES:
        if getattr(plan.precision, module) == "fp16":
            message = (
                'engine = "deepspeed" has no fp16 here: modules that it does not hold would not share its loss scale.'
            )
            yield Problem(f"precision.{module}", message, Fix("use bf16", (f"precision.{module}=bf16",)))


def offload(plan: Plan) -> Iterator[Problem]:
    """Offload is DeepSpeed's; parameters leave the device with ZeRO-3 alone."""
    mode, p = plan.offload.mode, plan.parallel
    if mode == "none":
        return
    if p.engine != "deepspeed":
        message = f"offload.mode = {mode} is done by DeepSpeed; the native engine keeps everything on the device."
        yield Problem("offload.mode", message, Fix("use DeepSpeed", ("parallel.engine=deepspeed",)))
    if mode in ("parameters", "nvme") and p.sharding != "zero3":
        message = f"offload.mode = {mode} moves parameters out, which only ZeRO-3 does (sharding is {p.sharding})."
        yield Problem("parallel.sharding", message, Fix("use zero3", ("parallel.sharding=zero3",)))
    if mode == "nvme":
        yield from _nvme(plan)


def _nvme(plan: Plan) -> Iterator[Problem]:
    instead = ("offload.mode=parameters",)
    if not plan.offload.nvme_path:
        message = "offload.mode = nvme needs a folder on the NVMe disk."
        yield Problem("offload.nvme_path", message, Fix("keep it in host memory, or name a folder", instead))
    missing = [name for name, found in (
        ("libaio (Debian: libaio-dev)", find_library("aio")),
        ("a C++ compiler (Debian: g++)", shutil.which("c++") or shutil.which("g++")),
        ("ninja (Debian: ninja-build)", shutil.which("ninja")),
    ) if not found]  # fmt: skip
    if missing:
        message = f"offload.mode = nvme compiles DeepSpeed's file reader; this host lacks {', '.join(missing)}."
        yield Problem("offload.mode", message, Fix("keep it in host memory, or install them", instead))
