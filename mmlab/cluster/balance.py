"""`mmlab balance`: the split of the decoder that this machine's own times ask for."""

from __future__ import annotations

from typing import Any

from mmlab.cluster.pool import RankPool, borrowed
from mmlab.plan import Plan

TIMEOUT = 600.0


def measure(plan: Plan, pool: RankPool | None = None) -> dict[str, Any]:
    """Measure a plan's layers on one process of this machine; `mmlab.plan.balance.report` says what comes back.

    PlanError when the plan has problems; MmlabError with what is wrong with its data.
    """
    plan.check().raise_if_any()
    with borrowed(1, pool) as own:
        found: dict[str, Any] = own.run("mmlab.train.balance:measure_plan", plan.dumps(), ranks=1, timeout=TIMEOUT)[0]
    return found
