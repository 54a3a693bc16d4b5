"""Degrees that fit the model, the batch and the nodes."""

from __future__ import annotations

from collections.abc import Iterator

from mmlab.plan.problems import Fix, Problem
from mmlab.plan.rules.common import divisor, tensor_sizes
from mmlab.plan.schema import Plan


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
    if plan.parallel.vision == "own_ranks" and ranks > batch:
        message = f"{ranks} encoder ranks for {batch} samples a step: some would never have an image."
        yield Problem("parallel.vision_dp", message, Fix("use fewer", (f"parallel.vision_dp={batch}",)))


def tensor_split(plan: Plan) -> Iterator[Problem]:
    """Heads, key/value heads, vocabulary and MLP split evenly over the tensor group."""
    c, tp = plan.model.language, plan.parallel.tp
    fits = divisor(tp, *(size for _, _, size in tensor_sizes(c)))
    uneven = [(field, what, size) for field, what, size in tensor_sizes(c) if size % tp]
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


def tensor_group_on_node(plan: Plan) -> Iterator[Problem]:
    """A tensor group never crosses a node: its collectives run in every block."""
    tp, room = plan.parallel.tp, plan.cluster.ranks_per_node
    if room and tp > room:
        fits = divisor(room, *(size for _, _, size in tensor_sizes(plan.model.language)))
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
    tp = p.tp if p.tp < room else divisor(p.tp - 1, *(size for _, _, size in tensor_sizes(plan.model.language)))
    encoders = (f"parallel.vision_dp={min(own, room - tp)}",) if own + tp > room else ()
    overrides = (*encoders, f"parallel.tp={tp}") if tp != p.tp else encoders
    yield Problem("parallel.vision_dp", message, Fix("make both fit", overrides))
