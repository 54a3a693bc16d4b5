"""What a plan must satisfy: one small function a rule, each yielding problems with field, message and fix.

To add a rule, write a function that takes a plan and yields problems, and put it into RULES.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator

from mmlab.errors import LabError
from mmlab.plan.keys import get
from mmlab.plan.problems import Fix, Problem
from mmlab.plan.schema import LanguageConfig, Plan

Rule = Callable[[Plan], Iterator[Problem]]

AVAILABLE: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("parallel.vision", ("own_ranks",)),
    ("parallel.cp", (1,)),
    ("parallel.sp", (False,)),
    ("parallel.transfer", ("p2p",)),
    ("parallel.schedule", ("1f1b", "gpipe")),
    ("parallel.sharding", ("none",)),
    ("parallel.engine", ("native",)),
    ("offload.mode", ("none",)),
    ("communication.vision.compressor", ("none",)),
    ("communication.language.compressor", ("none",)),
    ("precision.vision", ("bf16", "fp32", "fp64")),
    ("precision.projector", ("bf16", "fp32", "fp64")),
    ("precision.language", ("bf16", "fp32", "fp64")),
)
"""Fields of which this version has only some values, the value nearest to what was asked for first."""

MAX_LANES = 1024
"""Lanes beyond this make every manifest and checkpoint carry cursors without mixing samples any better."""


def check_platform(platform: str = "") -> None:
    """LabError on native Windows, where engines cannot start; `platform` as `sys.platform`, which is the default."""
    if (platform or sys.platform) == "win32":
        raise LabError("mmlab does not run on native Windows; use WSL2 (`wsl --install`) and install it there")


def divisor(limit: int, *numbers: int) -> int:
    """The largest number of at most `limit` (and at least 1) that divides all `numbers`."""
    return next(d for d in range(max(1, limit), 0, -1) if all(number % d == 0 for number in numbers))


def available(plan: Plan) -> Iterator[Problem]:
    """Values that the schema knows and this version cannot run yet."""
    for field, values in AVAILABLE:
        value = get(plan, field)
        if value not in values:
            shown = str(values[0]).lower() if isinstance(values[0], bool) else values[0]
            asked = str(value).lower() if isinstance(value, bool) else value
            fix = Fix(f"use {shown}", (f"{field}={shown}",))
            yield Problem(field, f"{asked} is not available in this version.", fix)


def name(plan: Plan) -> Iterator[Problem]:
    """The name becomes part of a folder's name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", plan.name):
        clean = re.sub(r"[^A-Za-z0-9._-]+", "-", plan.name).strip("-._")[:64] or "run"
        message = f"{plan.name!r} cannot be part of a folder's name: letters, digits, '.', '_' and '-', at most 64."
        yield Problem("name", message, Fix("rename the run", (f"name={clean}",)))


def vision_group(plan: Plan) -> Iterator[Problem]:
    """An encoder group exists exactly with vision = "own_ranks"."""
    p = plan.parallel
    if p.vision == "own_ranks" and p.vision_dp == 0:
        message = 'vision = "own_ranks" needs at least one rank for the encoder.'
        yield Problem("parallel.vision_dp", message, Fix("give the encoder a rank", ("parallel.vision_dp=1",)))
    if p.vision != "own_ranks" and p.vision_dp > 0:
        message = f'the encoder has ranks of its own only with vision = "own_ranks", not with {p.vision}.'
        yield Problem("parallel.vision_dp", message, Fix("set it to 0", ("parallel.vision_dp=0",)))


def vision_batch(plan: Plan) -> Iterator[Problem]:
    """Every encoder rank gets an image in a step."""
    batch, ranks = plan.data.global_batch, plan.parallel.vision_dp
    if ranks > batch:
        message = f"{ranks} encoder ranks for {batch} samples a step: some would never have an image."
        yield Problem("parallel.vision_dp", message, Fix("use fewer", (f"parallel.vision_dp={batch}",)))


def image_patches(plan: Plan) -> Iterator[Problem]:
    """Whole patches."""
    v = plan.model.vision
    if v.image_size % v.patch_size:
        size = max(1, round(v.image_size / v.patch_size)) * v.patch_size
        message = f"{v.image_size} pixels are not a multiple of patch_size {v.patch_size}."
        fix = Fix("use the nearest multiple", (f"model.vision.image_size={size}",))
        yield Problem("model.vision.image_size", message, fix)


def vision_heads(plan: Plan) -> Iterator[Problem]:
    """Encoder heads of equal width."""
    v = plan.model.vision
    if v.hidden % v.heads:
        message = f"{v.heads} heads do not divide hidden {v.hidden}."
        fix = Fix("use a divisor", (f"model.vision.heads={divisor(v.heads, v.hidden)}",))
        yield Problem("model.vision.heads", message, fix)


def language_heads(plan: Plan) -> Iterator[Problem]:
    """Decoder heads of equal, even width (rotary embedding turns pairs), shared evenly by key/value heads."""
    c = plan.model.language
    if c.hidden % (2 * c.heads):
        heads = divisor(c.heads, c.hidden // 2) if c.hidden % 2 == 0 else 0
        odd = f"{c.heads} heads do not split hidden {c.hidden} into heads of an even width."
        overrides = (f"model.language.heads={heads}", f"model.language.kv_heads={divisor(c.kv_heads, heads)}")
        width = -(-c.hidden // (2 * c.heads)) * 2 * c.heads
        fix = Fix("use a divisor", overrides) if heads else Fix("widen it", (f"model.language.hidden={width}",))
        yield Problem("model.language.heads" if heads else "model.language.hidden", odd, fix)
    elif c.heads % c.kv_heads:
        message = f"{c.kv_heads} key/value heads do not divide {c.heads} heads."
        fix = Fix("use a divisor", (f"model.language.kv_heads={divisor(c.kv_heads, c.heads)}",))
        yield Problem("model.language.kv_heads", message, fix)


def _split(c: LanguageConfig) -> tuple[tuple[str, str, int], ...]:
    """What tensor parallelism splits: (field, what it is, size)."""
    return (
        ("heads", "heads", c.heads),
        ("kv_heads", "key/value heads", c.kv_heads),
        ("vocab_size", "rows of the embedding table", c.vocab_size),
        ("intermediate", "columns of the MLP", c.mlp_width),
    )


def tensor_split(plan: Plan) -> Iterator[Problem]:
    """Heads, key/value heads, vocabulary and MLP split evenly over the tensor group."""
    c, tp = plan.model.language, plan.parallel.tp
    fits = divisor(tp, *(size for _, _, size in _split(c)))
    uneven = [(field, what, size) for field, what, size in _split(c) if size % tp]
    if uneven and uneven[0][0] == "vocab_size":
        # Padding the table is the usual answer (Megatron-LM does it); the degree stays.
        rows = -(-c.vocab_size // tp) * tp
        fix = Fix("pad the table", (f"model.language.vocab_size={rows}",))
        message = f"{c.vocab_size} rows of the embedding table do not split over tp {tp}."
        yield Problem("model.language.vocab_size", message, fix)
        uneven = uneven[1:]
    for field, what, size in uneven:
        message = f"{size} {what} (model.language.{field}) do not split over tp {tp}."
        yield Problem("parallel.tp", message, Fix("use a degree that divides them", (f"parallel.tp={fits}",)))


def stages(plan: Plan) -> Iterator[Problem]:
    """At least one decoder block a stage."""
    layers, pp = plan.model.language.layers, plan.parallel.pp
    if pp > layers:
        message = f"{pp} stages for {layers} decoder layers: some would be empty."
        yield Problem("parallel.pp", message, Fix("use at most one a layer", (f"parallel.pp={layers}",)))


def batch(plan: Plan) -> Iterator[Problem]:
    """The global batch splits into replicas and microbatches."""
    d, p = plan.data, plan.parallel
    parts = p.dp * p.microbatches
    if d.global_batch % parts:
        size = -(-d.global_batch // parts) * parts
        message = f"{d.global_batch} samples do not split into dp {p.dp} x {p.microbatches} microbatches."
        yield Problem("data.global_batch", message, Fix("round it up", (f"data.global_batch={size}",)))


def sequence(plan: Plan) -> Iterator[Problem]:
    """A sample holds an image with some text, and the model admits it."""
    d, c, image = plan.data, plan.model.language, plan.model.vision.tokens_per_tile
    if d.seq_len < image + 2:
        length = image + 64
        message = f"{d.seq_len} tokens do not hold the {image} tokens of one image and text to predict."
        positions = (f"model.language.max_positions={length}",) if c.max_positions < length else ()
        yield Problem("data.seq_len", message, Fix("make room", (f"data.seq_len={length}", *positions)))
    elif d.seq_len > c.max_positions:
        message = f"{d.seq_len} tokens are more than model.language.max_positions {c.max_positions}."
        longer = image + 2 > c.max_positions
        key = f"model.language.max_positions={d.seq_len}" if longer else f"data.seq_len={c.max_positions}"
        yield Problem("data.seq_len", message, Fix("raise the model's" if longer else "shorten samples", (key,)))


def tensor_group_on_node(plan: Plan) -> Iterator[Problem]:
    """A tensor group never crosses a node: its collectives run in every block."""
    tp, room = plan.parallel.tp, plan.cluster.ranks_per_node
    if room and tp > room:
        fits = divisor(room, *(size for _, _, size in _split(plan.model.language)))
        message = f"tp {tp} does not fit on a node of {room} ranks."
        yield Problem("parallel.tp", message, Fix("keep tensor groups inside a node", (f"parallel.tp={fits}",)))


def encoder_beside_first_stage(plan: Plan) -> Iterator[Problem]:
    """The encoder group shares the first stage's node: image tokens do not cross nodes."""
    p, room = plan.parallel, plan.cluster.ranks_per_node
    own = p.vision_dp if p.vision == "own_ranks" else 0
    if not room or not own or own + p.tp <= room or p.tp > room:
        return
    message = f"{own} encoder ranks and a tensor group of {p.tp} do not fit on the first stage's node of {room} ranks."
    if room == 1:
        yield Problem("parallel.vision_dp", message, Fix("use nodes of two ranks or more"))
        return
    tp = p.tp if p.tp < room else divisor(p.tp - 1, *(size for _, _, size in _split(plan.model.language)))
    encoders = (f"parallel.vision_dp={min(own, room - tp)}",) if own + tp > room else ()
    overrides = (*encoders, f"parallel.tp={tp}") if tp != p.tp else encoders
    yield Problem("parallel.vision_dp", message, Fix("make both fit", overrides))


def something_trains(plan: Plan) -> Iterator[Problem]:
    """At least one module has something to train."""
    t = plan.train
    if t.vision.frozen and t.projector.frozen and t.language.frozen:
        fix = Fix("train the projector at least", ("train.projector.frozen=false",))
        yield Problem("train.projector.frozen", "everything is frozen: nothing would be trained.", fix)


def lanes(plan: Plan) -> Iterator[Problem]:
    """A cursor a lane travels in every manifest and checkpoint."""
    if plan.data.lanes > MAX_LANES:
        message = f"{plan.data.lanes} lanes are more than {MAX_LANES}: each keeps a cursor in every checkpoint."
        yield Problem("data.lanes", message, Fix("use fewer", (f"data.lanes={MAX_LANES}",)))


RULES: tuple[Rule, ...] = (
    available,
    name,
    vision_group,
    vision_batch,
    image_patches,
    vision_heads,
    language_heads,
    tensor_split,
    stages,
    batch,
    sequence,
    tensor_group_on_node,
    encoder_beside_first_stage,
    something_trains,
    lanes,
)
"""All rules, in the order in which their problems are shown."""


def engine_count(plan: Plan, engines: int) -> Iterator[Problem]:
    """The plan needs no more ranks than there are engines."""
    if plan.world_size <= engines:
        return
    there = f"there are {engines} engines" if engines != 1 else "there is 1 engine"
    message = f"the plan needs {plan.world_size} ranks, but {there}."
    best = _fit(plan, engines)
    if best is None:
        least = 2 if plan.parallel.vision == "own_ranks" else 1
        yield Problem("parallel", message, Fix(f"start at least {least} engines"))
        return
    changed = [key for key, value in best.items() if get(plan, key) != value]
    overrides = tuple(f"{key}={best[key]}" for key in changed)
    yield Problem(changed[0], message, Fix(f"start {plan.world_size} engines, or use fewer ranks", overrides))


def _fit(plan: Plan, engines: int) -> dict[str, int] | None:
    """Degrees, none above the plan's, that use the most of `engines` ranks; dp and encoder ranks give way first."""
    p = plan.parallel
    own = p.vision_dp if p.vision == "own_ranks" else 0
    candidates = [
        (vision + dp * pp * p.cp * tp, pp, tp, vision, dp)
        for dp in range(1, p.dp + 1)
        if p.dp % dp == 0
        for vision in (range(1, own + 1) if own else (0,))
        for pp in range(1, p.pp + 1)
        for tp in range(1, p.tp + 1)
        if p.tp % tp == 0
    ]
    fitting = [candidate for candidate in candidates if candidate[0] <= engines]
    if not fitting:
        return None
    _, pp, tp, vision, dp = max(fitting)
    degrees = {"parallel.dp": dp, "parallel.vision_dp": vision, "parallel.pp": pp, "parallel.tp": tp}
    return degrees if own else {key: value for key, value in degrees.items() if key != "parallel.vision_dp"}


def find_problems(plan: Plan, engines: int | None = None) -> list[Problem]:
    """All problems of a plan; with `engines`, also whether that many are enough."""
    problems = [problem for rule in RULES for problem in rule(plan)]
    return problems + (list(engine_count(plan, engines)) if engines is not None else [])
