"""What of the encoder's work may be done together or ahead."""

from __future__ import annotations

from collections.abc import Iterator

from mmlab.plan.holders import shared
from mmlab.plan.problems import Fix, Problem
from mmlab.plan.schema import Plan


def encoder_batch(plan: Plan) -> Iterator[Problem]:
    """The encoder takes no more microbatches at once than a step has."""
    p = plan.parallel
    if p.encoder_batch > p.microbatches:
        message = f"the encoder cannot take {p.encoder_batch} microbatches at once: a step has {p.microbatches}."
        yield Problem("parallel.encoder_batch", message, Fix("take all", (f"parallel.encoder_batch={p.microbatches}",)))


def encoder_ahead(plan: Plan) -> Iterator[Problem]:
    """Only an encoder that stays as it is, on ranks that have nothing else to do, works ahead."""
    p = plan.parallel
    if not p.encoder_ahead:
        return
    fix = Fix("encode each step in its turn", ("parallel.encoder_ahead=0",))
    if not plan.train.vision.frozen:
        message = "an encoder that trains cannot work ahead: the features of a step depend on the update before it."
        yield Problem("parallel.encoder_ahead", message, fix)
    if shared(plan, "vision"):
        message = "an encoder that is shared out gathers its weights with other ranks, which the background cannot do."
        yield Problem("sharding.vision", message, Fix("keep it whole", ("sharding.vision=whole",)))
    if p.vision != "own_ranks":
        message = (
            f'working ahead needs ranks that are idle while the pipeline works; with vision = "{p.vision}" the encoder '
            "would only take their time from it."
        )
        yield Problem("parallel.encoder_ahead", message, fix)
