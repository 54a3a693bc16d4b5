"""Going on with fewer ranks while an engine is lacking, and with all of them when it is back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable

from mmlab.cluster.engines import ANSWER, Engines
from mmlab.cluster.launching import ActiveRun, Again
from mmlab.errors import LabError, MmlabError
from mmlab.messages import new_command, read_ack, send, write_atomic
from mmlab.plan import Plan
from mmlab.plan.fewer import fewer
from mmlab.plan.relayout import differences

TICK = 0.5
"""Seconds between looks at whether enough engines are up again."""
RETRY = 60.0
"""Seconds until a run that has refused its full layout is asked again."""


def shrink(run: ActiveRun, ranks: int, why: str) -> bool:
    """Have the next generation started on at most `ranks` ranks, from the newest checkpoint; False where no smaller
    layout of the plan is admitted. The full plan is kept as `plan.full.toml`."""
    full, paths = Plan.load(run.paths.plan), run.paths
    if paths.full_plan.is_file():
        full = Plan.load(paths.full_plan)
    smaller = fewer(full, ranks)
    if smaller is None or smaller.world_size >= run.world:
        return False
    if not paths.full_plan.is_file():
        write_atomic(paths.full_plan, full.dumps().encode())
    run.shrunk_from = Plan.load(paths.plan)
    write_atomic(paths.plan, smaller.dumps().encode())
    run.again = Again(run.restore, f"going on with {smaller.world_size} of {full.world_size} ranks: {why}")
    return True


def say_shrunk(run: ActiveRun) -> None:
    """Log the other layout once the run is at work in it: from the step that it was restored at."""
    if run.shrunk_from is None or not run.stepped:
        return
    before, after = run.shrunk_from, Plan.load(run.paths.plan)
    old, new = differences(after, before), differences(before, after)
    run.emit(
        "relayout", step=run.begun, name=run.restore or "", changes={key: [old[key], new[key]] for key in new},
        before=before.world_size, after=after.world_size, generation=run.generation, through="disk", bytes=0,
        seconds=0.0, steps=after.train.steps,
    )  # fmt: skip
    run.shrunk_from = None


def grow_back(run: ActiveRun, engines: Engines, closing: Callable[[], bool]) -> None:
    """Wait until the engines of the full layout are up and warm, then ask the run to take it up at a step boundary."""
    with contextlib.suppress(OSError, MmlabError):  # it may have ended, and its folder gone
        full = Plan.load(run.paths.full_plan)
        values = differences(Plan.load(run.paths.plan), full)
        asked, sent_at = "", 0.0
        while not (closing() or run.ended or run.again is not None):
            engines.ensure(full.world_size + full.cluster.spares)
            refused = asked and (ack := read_ack(run.paths.control, asked)) is not None and not ack.ok
            if (not asked or (refused and time.monotonic() - sent_at > RETRY)) and _warm(engines, full.world_size):
                command = new_command("relayout", {"changes": values}, source="recovery")
                send(run.paths.control, command)
                asked, sent_at = command.id, time.monotonic()
            time.sleep(TICK)


def _warm(engines: Engines, n: int) -> bool:
    """Whether at least n engines are up and have imported what training needs."""
    up = engines.up()
    if len(up) < n:
        return False
    try:
        return all(engines.call(up, "warmed", [()] * len(up), ANSWER))
    except LabError:  # one of them ended: another comes
        return False
