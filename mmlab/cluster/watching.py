"""Looking after a run that has started: a lost engine, a hang, a failure, ranks that have left."""

from __future__ import annotations

import time

from mmlab.cluster.elastic import say_shrunk
from mmlab.cluster.engines import Engines
from mmlab.cluster.launching import ActiveRun, Again, write_lost
from mmlab.cluster.recovery import fall_back, has_checkpoint, recover, say_recovered
from mmlab.messages import (
    LEFT_UNSAID,
    BeaconState,
    Failure,
    all_left,
    claim_report,
    read_aborted,
    read_beacons,
    read_failures,
    write_failure,
)
from mmlab.messages.moves import Move, forget_move, moving_on
from mmlab.messages.notices import read_notices
from mmlab.tracking.doctor import diagnose
from mmlab.tracking.record import RunRecord

SURVIVORS = 1.0
"""Seconds that a surviving rank has to report a failure before the keeper does, and that a rank with a cause of its own
may come after those that only noticed that a peer had gone."""
LOOK = 2.0
"""Seconds between looks at whether ranks have left without a word, or hang."""
LONG = ("start", "eval", "checkpoint")
"""Phases in which ranks may be for long without a sign of progress."""
LENIENT = 10.0
"""How many times longer nothing may move in these phases, and before the first step has ended (compilation)."""


def watch(run: ActiveRun, engines: Engines) -> None:
    """One look at a started run: take in its events, write down the loss of an engine at once, and see to failures."""
    if run.again is not None:
        return
    run.read()
    if not run.paths.root.is_dir():
        run.state = "stopped"  # deleted under its ranks: the next run takes their engines, or new ones in their place
    if run.ended or not run.engines:
        return
    if move := moving_on(run.paths, run.generation):
        _move_on(run, engines, move)
        return
    say_recovered(run)
    say_shrunk(run)
    for rank, engine in enumerate(run.engines):
        if engines.lost(engine):
            write_lost(run, rank, engine)
    failures = read_failures(run.paths.failures, run.generation)
    if failures:
        run.read()  # what it has done before it failed, or that a rank has reported it meanwhile
        say_recovered(run)
        if not run.ended:
            _see_to(run, engines, failures[0])
    else:
        _notice_left(run, engines)
        if run.again is None and not run.ended:
            _notice_hang(run)


def _move_on(run: ActiveRun, engines: Engines, move: Move) -> None:
    """The ranks have left with their state: the next generation begins, on engines that nobody takes away."""
    if move.notice:
        engines.notices = [notice for notice in read_notices(run.paths) if notice.kind == "leave"]
        if any(notice.pid is None and notice.host == engines.host for notice in engines.notices):
            forget_move(run.paths)
            run.emit("state", state="stopped", reason=f"{move.notice}; so is this lab, with it: restore it elsewhere")
            run.state = "stopped"
            return
    run.again = Again(move.name or ("latest" if has_checkpoint(run) else None), move.reason)


def _see_to(run: ActiveRun, engines: Engines, first: Failure) -> None:
    """Recover from a failure, or see that the log says that the run has failed."""
    run.noticed = run.noticed or time.monotonic()
    waited = time.monotonic() - run.noticed
    aborted = read_aborted(run.paths.failures, run.generation) is not None
    own = first.kind not in ("lost", "hung", "peer") or (not run.cluster.max_recoveries and waited >= SURVIVORS)
    if own and not aborted and fall_back(run, first.sentence()):
        return
    if run.cluster.max_recoveries and first.kind != "input" and not aborted:
        if first.kind != "peer" or waited >= SURVIVORS:
            recover(run, engines, first)
        return
    if waited >= SURVIVORS and (
        claim_report(run.paths.failures, run.generation) or waited > 3 * SURVIVORS
    ):  # no rank has reported it
        run.fail(first, first.sentence())


def _beacons(run: ActiveRun) -> list[BeaconState]:
    return [beacon for beacon in read_beacons(run.paths.ranks) if beacon.generation == run.generation]


def _notice_left(run: ActiveRun, engines: Engines) -> None:
    """See to a run whose ranks have all left without being able to say why."""
    if time.monotonic() - run.looked < LOOK:
        return
    run.looked = time.monotonic()
    if all_left(_beacons(run), run.world):
        run.read()
        if run.ended:
            return
        if run.cluster.max_recoveries:
            recover(run, engines, Failure(0, "rank 0", "start", run.step, "exception", LEFT_UNSAID))
        else:
            run.emit("state", state="failed", reason=LEFT_UNSAID)
            run.state = "failed"


def _notice_hang(run: ActiveRun) -> None:
    """Write down which ranks hang when nothing has moved for too long; they and the others are then freed."""
    limit, now = run.cluster.hang_timeout, time.monotonic()
    if not limit or not run.cluster.max_recoveries or now - run.glanced < min(LOOK, limit / 10):
        return
    run.glanced = now
    beacons = _beacons(run)
    marks = tuple(beacon.updated for beacon in beacons)
    if marks != run.marks or run.state == "paused":
        run.marks, run.moved = marks, now
        return
    if not run.stepped or any(beacon.phase in LONG for beacon in beacons):
        limit *= LENIENT
    if now - run.moved < limit or not beacons:
        return
    found = diagnose(RunRecord(run.paths.root))
    run.read()
    if run.ended or tuple(beacon.updated for beacon in _beacons(run)) != marks:
        return
    views = {view.rank: view for view in found.ranks}
    hung = found.missing or [min(beacons, key=lambda beacon: beacon.updated).rank]
    for rank in hung:
        view = views[rank]
        message = f"nothing moved for {now - run.moved:.0f} s; {found.findings}"
        failure = Failure(rank, view.role, view.phase, view.step, "hung", message, found.text)
        write_failure(run.paths.failures, run.generation, failure)
