"""How tokens are split over ranks: sequence and context parallelism."""

from __future__ import annotations

from collections.abc import Iterator

from mmlab.plan.problems import Fix, Problem
from mmlab.plan.rules.common import divisor
from mmlab.plan.schema import Plan


def sequence_parallel(plan: Plan) -> Iterator[Problem]:
    """Sequence parallelism splits tokens over the tensor group."""
    if plan.parallel.sp and plan.parallel.tp == 1:
        message = "sequence parallelism splits tokens over the ranks of a tensor group, and tp is 1."
        yield Problem("parallel.sp", message, Fix("turn it off", ("parallel.sp=false",)))


def ulysses_heads(plan: Plan) -> Iterator[Problem]:
    """Ulysses gives each context-parallel rank whole heads of what its tensor rank has."""
    c, p = plan.model.language, plan.parallel
    if p.cp == 1 or p.cp_mode != "ulysses":
        return
    for field, what, heads in (("heads", "heads", c.heads), ("kv_heads", "key/value heads", c.kv_heads)):
        if heads % p.tp == 0 and heads // p.tp % p.cp:
            fits = divisor(p.cp, c.heads // p.tp, c.kv_heads // p.tp) if c.kv_heads % p.tp == 0 else 1
            fix = Fix("use ring attention, which splits any number", ("parallel.cp_mode=ring",))
            if fits > 1:
                fix = Fix("use a degree that divides them", (f"parallel.cp={fits}",))
            message = f"{heads} {what} (model.language.{field}) over tp {p.tp} do not split over cp {p.cp} in Ulysses."
            yield Problem("parallel.cp", message, fix)
            return


def image_scope(plan: Plan) -> Iterator[Problem]:
    """Text that every rank holds is merged by log-sum-exp, as the ring does."""
    p = plan.parallel
    if p.cp_scope == "image" and p.cp_mode == "ulysses" and p.cp > 1:
        message = "text is whole on each rank and partial attentions are merged, which Ulysses has none of."
        yield Problem("parallel.cp_scope", message, Fix("use ring attention", ("parallel.cp_mode=ring",)))
