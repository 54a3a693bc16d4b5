"""The pipeline: schedules, model chunks, and how decoder blocks are dealt to stages."""

from __future__ import annotations

from collections.abc import Iterator

from mmlab.plan.problems import Fix, Problem
from mmlab.plan.schema import Plan
from mmlab.plan.stages import even_split


def chunks(plan: Plan) -> Iterator[Problem]:
    """As many model chunks a rank as the schedule runs."""
    p = plan.parallel
    fix = Fix("let the schedule choose", ("parallel.chunks=0",))
    if p.schedule == "interleaved" and p.chunks == 1:
        message = "interleaved runs several model chunks on each rank; with one it is 1f1b."
        yield Problem("parallel.chunks", message, Fix("use 1f1b", ("parallel.schedule=1f1b",)))
    elif p.schedule == "zb_v" and p.chunks not in (0, 2):
        message = f"zb_v folds the model into a V: 2 model chunks on each rank, not {p.chunks}."
        yield Problem("parallel.chunks", message, fix)
    elif p.schedule not in ("interleaved", "zb_v") and p.chunks > 1:
        message = f"{p.schedule} runs one model chunk on each rank, not {p.chunks}; interleaved and zb_v run more."
        yield Problem("parallel.chunks", message, fix)


def interleaved_microbatches(plan: Plan) -> Iterator[Problem]:
    """Interleaved 1F1B takes microbatches in groups of pp (Narayanan et al. 2021, section 2.2)."""
    p = plan.parallel
    if p.schedule == "interleaved" and p.microbatches % p.pp:
        fits = -(-p.microbatches // p.pp) * p.pp
        message = f"interleaved takes microbatches in groups of pp {p.pp}; {p.microbatches} are not a multiple of it."
        yield Problem("parallel.microbatches", message, Fix("use a multiple", (f"parallel.microbatches={fits}",)))


def sharded_schedule(plan: Plan) -> Iterator[Problem]:
    """FSDP2 reduces when a backward ends: it would lose the gradients of weights that a schedule puts off."""
    p = plan.parallel
    if p.sharding in ("zero2", "zero3") and p.splits_backward:
        message = f"{p.sharding} would lose the weight gradients that {p.schedule} puts off; zero1 keeps them whole."
        yield Problem("parallel.sharding", message, Fix("share the optimizer alone", ("parallel.sharding=zero1",)))


def stages(plan: Plan) -> Iterator[Problem]:
    """At least one decoder block a stage."""
    layers, p = plan.model.language.layers, plan.parallel
    count = p.pp * p.chunks_per_rank
    if count <= layers:
        return
    if p.pp > layers:
        message = f"{p.pp} stages for {layers} decoder layers: some would be empty."
        yield Problem("parallel.pp", message, Fix("use at most one a layer", (f"parallel.pp={layers}",)))
    else:
        message = (
            f"{p.schedule} with pp {p.pp} and {p.chunks_per_rank} model chunks makes {count} stages of {layers} "
            "decoder layers: some would be empty."
        )
        overrides = ("parallel.schedule=1f1b", "parallel.chunks=0")
        yield Problem("parallel.schedule", message, Fix("use a schedule with one chunk", overrides))


def split(plan: Plan) -> Iterator[Problem]:
    """A split that is given names every stage and deals out every block once."""
    p, layers = plan.parallel, plan.model.language.layers
    given, count = p.layers_per_stage, p.pp * p.chunks_per_rank
    if not given or (len(given) == count and sum(given) == layers):
        return
    if len(given) != count:
        message = f"{len(given)} numbers for {count} stages (pp {p.pp} x {p.chunks_per_rank} model chunks)."
    else:
        message = f"{' + '.join(map(str, given))} = {sum(given)} decoder blocks, but the model has {layers}."
    even = list(even_split(layers, count)) if layers >= count else []
    yield Problem("parallel.layers_per_stage", message, Fix("split evenly", (f"parallel.layers_per_stage={even}",)))
