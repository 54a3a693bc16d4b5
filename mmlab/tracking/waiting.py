"""Waiting for a run: the only thing in the lab that blocks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

from mmlab.errors import MmlabError, RunFailed
from mmlab.messages import EventLog, claim_report, write_json
from mmlab.messages.moves import replace_plan
from mmlab.plan import Plan
from mmlab.plan.relayout import differences
from mmlab.tracking.progress import Bar, progress_bar
from mmlab.tracking.record import ENDED, RunRecord
from mmlab.tracking.sent import WaitInterrupted, WaitTimeout

POLL = 0.1
"""Seconds between looks at what is waited for."""
REPORT = 3.0
"""Seconds between the claim to report a failure and its event, on a busy machine."""


def reached(record: RunRecord, status: dict[str, Any], step: int | None = None) -> bool:
    """Whether a run has ended, or has done `step` steps (of this generation: not while it waits to be started again).

    RunFailed when it has failed, or was deleted: what was waited for cannot come any more.
    """
    if status["state"] == "deleted":
        raise RunFailed(f"run {record.id} was deleted: {status['reason']}")
    if status["state"] == "failed":
        message = f"run {record.id} failed: {status['reason']}; logs are in {record.paths.logs}"
        raise RunFailed(message, record.cause())
    started = status["state"] not in ("queued", "starting")
    return status["state"] in ENDED or (started and step is not None and status["step"] >= step)


def wait_for(
    record: RunRecord, look: Callable[[], dict[str, Any]], step: int | None, timeout: float | None, progress: bool
) -> None:
    """Wait until a run has ended, or has done `step` steps; `look` gives its status.

    RunFailed when it fails or is deleted, WaitTimeout after `timeout` seconds, WaitInterrupted on Ctrl-C: the run goes
    on.
    """
    end = None if timeout is None else time.monotonic() + timeout
    try:
        with progress_bar(record.id) if progress else contextlib.nullcontext() as bar:
            while not _done(record, look(), step, bar):
                if end is not None and time.monotonic() > end:
                    now = look()
                    goal = "its end" if step is None else f"step {step}"
                    raise WaitTimeout(
                        f"run {record.id} did not reach {goal} in {timeout:g} s: {now['state']} at step {now['step']}"
                    )
                time.sleep(POLL)
    except KeyboardInterrupt:
        raise WaitInterrupted(f"stopped waiting; run {record.id} goes on (run.stop() ends it)") from None


def _done(record: RunRecord, status: dict[str, Any], step: int | None, bar: Bar | None) -> bool:
    if bar is not None:
        bar.update(status["step"], status["steps"], words(record, status))
    return reached(record, status, step)


def words(record: RunRecord, status: dict[str, Any]) -> str:
    """State, loss and speed of a run in a few words."""
    last = record.last_step()
    parts = [] if status["state"] == "running" else [status["state"]]
    if last:
        parts.append(f"loss {last.get('loss', float('nan')):.4g}")
        if last.get("tokens_per_s"):
            parts.append(f"{last['tokens_per_s']:.0f} tokens/s")
    return ", ".join(parts)


def settle(record: RunRecord) -> None:
    """See that the log of a run that has failed says so, before its next generation writes to it.

    Faces see a loss from the files at once; the event that a surviving rank, or the keeper, appends comes later, and
    would otherwise be taken for a failure of the new generation.
    """
    status = record.status()
    end = time.monotonic() + REPORT
    while status["state"] == "failed" and record.last_state() not in ENDED:
        if claim_report(record.paths.failures, status["generation"]) or time.monotonic() > end:
            log = EventLog(record.paths.events, status["lineage"])
            log.emit("state", state="failed", step=status["step"], reason=status["reason"])
            log.close()
        time.sleep(0.02)


def queue_again(record: RunRecord) -> None:
    """Write that a run which had ended waits for its next generation, whose number is in `run.json` already."""
    status = record.status()
    log = EventLog(record.paths.events, status["lineage"])
    log.emit("state", state="queued", step=status["step"], reason="")
    log.close()


def begin_layout(record: RunRecord, found: dict[str, Any], new: Plan) -> None:
    """Give the next generation of a run that has ended another plan, and say so; it goes on from a checkpoint (a row).

    MmlabError when the run's folder cannot be written.
    """
    old = record.live_plan()
    before, after = differences(new, old), differences(old, new)
    try:
        settle(record)
        info = record.info
        generation = int(info["generation"]) + 1
        ranks = {"before": info["world_size"], "after": new.world_size}
        replace_plan(record.paths, new.dumps(), generation)
        write_json(record.paths.run, info | {"world_size": new.world_size})
        log = EventLog(record.paths.events, str(found["lineage"]))
        changes = {key: [before[key], value] for key, value in after.items()}
        log.emit("relayout", step=found["step"], name=found["name"], changes=changes,
                 generation=generation, through="disk", bytes=found["bytes"] + found["shared_bytes"], seconds=0.0,
                 steps=new.train.steps, **ranks)  # fmt: skip
        log.close()
    except OSError as error:
        raise MmlabError(
            f"run {record.id} cannot start: {record.paths.root} cannot be written ({error.strerror})"
        ) from None


def next_generation(record: RunRecord, lab: dict[str, Any]) -> int:
    """Begin the next generation of a run in `run.json`, for a lab {"root", "host"}; its number.

    MmlabError when the run's folder cannot be written: nothing is to be started then.
    """
    try:
        settle(record)
        info = record.info
        generation = int(info["generation"]) + 1
        write_json(record.paths.run, info | {"generation": generation, "lab": lab, "keeper": None, "engines": []})
        if generation > 1:
            queue_again(record)
    except OSError as error:
        raise MmlabError(
            f"run {record.id} cannot start: {record.paths.root} cannot be written ({error.strerror})"
        ) from None
    return generation
