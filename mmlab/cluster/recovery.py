"""What becomes of a run of which a rank has failed: recovered at most so often in a window, then failed.

The ranks that live keep their processes, and everybody builds everything anew (design, decision 11). A lost rank gets
another engine; so does a hung one that does not come free, and one that fails again.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from mmlab.cluster.engines import Engines
from mmlab.cluster.launching import ActiveRun, Again, Recovery
from mmlab.errors import MmlabError
from mmlab.messages import Failure, claim_report, new_command, read_events, read_json, send
from mmlab.messages.checkpoints import location_of, manifests, newest_first
from mmlab.messages.moves import falls_back, go_back, read_move, rescue_move, say_moved
from mmlab.plan import Plan

ONLY_A_NEW_PROCESS = ("cuda error", "nccl error")
"""What the message of a failure contains after which its process cannot go on (from knowledge, not tried here)."""


def recover(run: ActiveRun, engines: Engines, first: Failure) -> None:
    """Have the next generation of a run started from its newest checkpoint, or from the beginning where there is none;
    the run fails instead when it has been recovered too often."""
    now, most = time.monotonic(), run.cluster.max_recoveries
    recent = [past for past in run.history if now - past.noticed < run.cluster.recovery_window]
    if len(recent) >= most:
        times = f"{len(recent)} time{'s' if len(recent) > 1 else ''}"
        before = "; ".join(f"{past.failure.sentence()}" for past in recent)
        window = f"cluster.max_recoveries = {most} within {run.cluster.recovery_window:g} s"
        run.fail(first, f"{first.sentence()}; recovered {times} before ({window}): {before}")
        return
    engine = run.engines[first.rank] if first.rank < len(run.engines) else None
    found = Recovery(now, first, len(recent) + 1, 0 if engine is None else engine.pid)
    again = any(past.pid == found.pid for past in recent)
    if engine is not None and (again or any(mark in first.message.lower() for mark in ONLY_A_NEW_PROCESS)):
        engines.kill(engine)
    move = read_move(run.paths)
    saved = has_checkpoint(run) or move
    if move is not None and move.generation == run.generation and not move.notice:  # it was to take that up
        say_moved(run.paths, move, Plan.load(run.paths.plan).train.steps, run.emit)
    restore = "latest" if saved else None
    run.history.append(found)
    run.recovering = found
    run.emit("recovery", done=False, restore=restore, **_about(run, found, run.generation + 1))
    _set_again(run)
    run.again = Again(restore, f"recovering ({found.attempt} of {most}): {first.sentence()}")


def _set_again(run: ActiveRun) -> None:
    """Leave what was set since the newest checkpoint for the next generation, which begins with that one's values."""
    with contextlib.suppress(MmlabError, OSError):
        events = read_events(run.paths.events)[0]
        location = location_of(run.paths, Plan.load(run.paths.plan).checkpoint.location)
        found = newest_first(manifests(location), events)
        since = found[0][1]["step"] if found else 0
        values: dict[str, Any] = {}
        for event in events:
            if event["kind"] in ("restore", "relayout"):  # what was set before is given up, or in the plan
                values = {}
            elif event["kind"] == "command" and event["verb"] == "set" and event["ok"] and event["step"] >= since:
                values |= event["args"]["values"]
        if values:
            send(run.paths.control, new_command("set", {"values": values}, source="recovery"))


def has_checkpoint(run: ActiveRun) -> bool:
    """Whether there is a checkpoint to go on from, wherever the plan keeps them."""
    try:
        return bool(manifests(location_of(run.paths, Plan.load(run.paths.plan).checkpoint.location)))
    except (MmlabError, OSError):
        return True  # who cannot look does not begin anew: the ranks will say why they cannot go on


def fall_back(run: ActiveRun, why: str) -> bool:
    """Let a run whose new layout cannot start go on in the one before, from where it left that; False where it was not
    about to change its layout."""
    move = falls_back(run.paths, run.generation)
    if move is None:
        return False
    claim_report(run.paths.failures, run.generation)  # no rank that fails later on is to say that the run has failed
    name = go_back(run.paths, move)
    if move.paused:
        send(run.paths.control, new_command("pause", source="relayout"))
    run.emit("warning", message=f"the new layout could not start, and the run goes on in the one before: {why}")
    run.again = Again(name or "latest", f"back in the layout before: {why}")
    return True


def tidy(run: ActiveRun) -> None:
    """Make the state that a run which has ended was about to hand on a checkpoint, and leave nothing in memory, unless
    another lab or torchrun has started the run again: then it may be on its way to theirs."""
    info = read_json(run.paths.run)
    if info is None or info.get("generation") == run.generation:
        rescue_move(run.paths)
    run.tidied = True


def say_recovered(run: ActiveRun) -> None:
    """Once the first step of a generation after a failure has ended: log it, with the time it took."""
    found = run.recovering
    if found is None or not run.stepped:
        return
    pairs = zip(run.engines, run.before, strict=False)
    replaced = {str(rank): new.id for rank, (new, old) in enumerate(pairs) if new != old}
    seconds = round(time.monotonic() - found.noticed, 2)
    about = _about(run, found, run.generation)
    run.emit("recovery", done=True, restore=run.restore, replaced=replaced, seconds=seconds, **about)
    run.recovering = None


def _about(run: ActiveRun, found: Recovery, generation: int) -> dict[str, object]:
    first = found.failure
    evidence = first.details if first.kind == "hung" else ""
    return {
        "reason": first.sentence(), "cause": first.kind, "rank": first.rank, "role": first.role, "phase": first.phase,
        "attempt": found.attempt, "of": run.cluster.max_recoveries, "generation": generation, "evidence": evidence,
    }  # fmt: skip
