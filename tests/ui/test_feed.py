"""The feed: what a run's folder says, read a piece at a time."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from mmlab.cli.training import results_of
from mmlab.errors import MmlabError, RunFailed
from mmlab.messages import PHASES
from mmlab.messages.events import read_lines
from mmlab.tracking.record import RunRecord
from mmlab.ui import feed as feeds
from mmlab.ui.feed import Feed
from ui.synthetic import SyntheticRun


def read(run: SyntheticRun, **options: int) -> Feed:
    feed = Feed(run.dir, **options)
    feed.read()
    feed.look()
    return feed


def test_follows_steps_state_and_evaluations(started: SyntheticRun) -> None:
    started.train(30)
    started.evaluate()
    feed = read(started)
    assert (feed.state, feed.step, feed.steps) == ("running", 30, 120)
    assert len(feed.curves["loss"]) == 30
    assert len(feed.curves["held_out"]) == len(feed.curves["swapped"]) == 1
    assert feed.last["step"] == 30
    assert feed.read() == 0
    started.train(5)
    seen: list[int] = []
    assert feed.read(lambda event: seen.append(event["step"])) == 5
    assert seen == [31, 32, 33, 34, 35]
    assert feed.step == 35


def test_tells_what_keeps_a_run_from_its_next_step(started: SyntheticRun) -> None:
    started.train(3)
    assert read(started).doing == "running"
    started.beacons[0].update("eval")
    assert read(started).doing == "evaluating"
    started.state("paused")
    assert read(started).doing == "paused"


def test_a_restore_takes_the_curves_back(started: SyntheticRun) -> None:
    started.train(40)
    feed = read(started)
    started.events.emit("lineage", id="b", parent="a", parent_step=25, step=25)
    started.step = 25
    feed.read()
    assert (feed.step, feed.cuts, len(feed.curves["loss"])) == (25, 1, 25)
    started.train(1)
    feed.read()
    assert list(feed.curves["loss"].points()[0]) == list(range(1, 27))


def test_live_values_follow_accepted_commands(started: SyntheticRun) -> None:
    values = {"train.language.lr": 5e-4, "train.steps": 77}
    started.events.emit("command", id="1", verb="set", args={"values": values}, ok=True, ranks=[0], message="", step=0)
    refused = {"train.vision.lr": 9.0}
    started.events.emit("command", id="2", verb="set", args={"values": refused}, ok=False, ranks=[], message="", step=0)
    feed = read(started)
    assert feed.rates["language"] == 5e-4
    assert feed.rates["vision"] == started.plan.train.vision.lr
    assert feed.steps == 77
    assert [event["id"] for event in feed.commands] == ["1", "2"]


def test_phases_are_means_over_the_last_steps(started: SyntheticRun) -> None:
    for step, seconds in ((1, 1.0), (2, 3.0)):
        phases = [[seconds] * len(PHASES)] * 6
        started.events.emit("step", step=step, loss=1.0, phases=phases)
    assert read(started).phases() == [[2.0] * len(PHASES)] * 6


def test_a_folder_that_is_gone_for_a_moment_is_not_a_deleted_run(
    started: SyntheticRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    started.train(2)
    feed, unread, aside = read(started), RunRecord(started.dir), started.dir.with_name("aside")
    started.dir.rename(aside)
    feed.read()
    feed.look()
    assert (feed.state, feed.ended) == ("running", False)
    with pytest.raises(MmlabError, match=rf"run {started.dir.name} was deleted: .* is gone"):
        unread.placement()
    monkeypatch.setattr(feeds, "GONE", 0.0)
    feed.look()
    assert (feed.state, feed.ended) == ("deleted", True)
    with pytest.raises(RunFailed, match=r"was deleted: .* is gone") as failed:
        results_of(feed, 1.0)
    assert failed.value.exit_code == 2
    aside.rename(started.dir)
    feed.read()
    feed.look()
    assert (feed.state, len(feed.ranks)) == ("running", 6)


def told(feed: Feed) -> dict[str, object]:
    """Everything that a feed has read."""
    trail = feed.compression
    apart = ("paths", "record", "curves", "compression", "_index")
    own = {name: repr(value) for name, value in vars(feed).items() if name not in apart}
    curves = {name: (series.points(), series.last, series.whole) for name, series in feed.curves.items()}
    closer = {name: series.points() for name, series in feed.closer(feed.curves, 50, 500).items()}
    rest = [feed.phases(), trail.errors, trail.changes, str(trail.table()), curves, closer]
    return own | {"rest": repr(rest)}


def hard_log(run: SyntheticRun) -> Iterator[None]:
    """A log with all that makes reading hard, part by part; the last line is half-written."""
    foreign = [
        *(
            b'{"t":1,"kind":"step","lineage":"a","step":3,"lo',
            b"[1]",
            b"\xff",
            b'{"kind":"step"}',
            b'{"t":2,"kind":"new"}',
        ),
        b'{"t":1, "kind":"step", "lineage":"a", "step":401, "loss":NaN, "lr":{"x":null}, "grad_norm":{"x":Infinity}}',
        b'{"t":1,"kind":"warning","message":"half \\ud800"}',
    ]
    run.train(300)
    run.evaluate(1)
    run.checkpoint("best")
    yield
    with open(run.paths.events, "ab") as file:
        file.write(b"\r\n".join([*foreign, b""]))
    run.error = 0.25
    run.train(200)
    values = {"train.steps": 777, "train.language.lr": 5e-4, "communication.vision.rank": 2}
    run.events.emit("command", id="1", verb="set", args={"values": values}, ok=True, ranks=[0], message="", step=500)
    run.restore("best", "b")
    run.train(150)
    yield
    run.coded = {**run.coded, "compressor": "topk", "options": {"ratio": 0.1}}
    run.events.emit("relayout", name="x", changes={}, before=6, after=6, generation=1, steps=900, step=run.step)
    run.train(90)
    run.state("paused", "enough")
    run.restore("best", "c")
    run.train(60)
    run.state("failed", "broken")
    with open(run.paths.events, "ab") as file:
        file.write(b'{"t":1,"kind":"step","lineage":"c","step":3')
    yield


def test_a_log_read_in_slices_while_it_grows_ends_as_one_read_at_once(
    started: SyntheticRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    sliced, shares, reads = Feed(started.dir, capacity=100), [], []
    for _ in hard_log(started):
        for _ in range(3):  # it grows before all of it has been read
            monkeypatch.setattr(feeds, "READ_LIMIT", 50_000)
            monkeypatch.setattr(feeds, "read_lines", lambda *some: (reads.append(some), read_lines(*some))[1])
            sliced.read(seconds=0)
            shares.append(sliced.reading)
    assert len(reads) == len(shares)  # what is read is not thrown away
    assert all(share is not None and 0 < share < 1 for share in shares)
    assert (sliced.state, sliced.reason, sliced.ended) == ("failed", "broken", False)  # as the end of the log says
    while sliced.reading is not None:
        sliced.read(seconds=0)
    monkeypatch.undo()
    whole = Feed(started.dir, capacity=100)
    whole.read()
    assert whole.ended
    assert sliced.ended
    assert told(sliced) == told(whole)
    events = [json.loads(line) for line in started.paths.events.read_bytes().splitlines()[-50:-1]]
    losses = [event["loss"] for event in events if event["kind"] == "step"]
    assert list(whole.curves["loss"].points()[1])[-1] == losses[-1]


def test_memory_is_bounded_for_long_runs(started: SyntheticRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "READ_LIMIT", 20_000)
    started.train(2000)
    feed = read(started, capacity=200)
    assert feed.step == 2000
    assert all(len(series) <= 202 for series in feed.curves.values())


def test_a_dead_rank_fails_the_run_in_the_feed(started: SyntheticRun) -> None:
    started.train(3)
    dead = os.fork()
    if dead == 0:
        os._exit(0)
    os.waitpid(dead, 0)
    path = started.paths.ranks / "rank-3.beacon"
    data = bytearray(path.read_bytes())
    data[8:12] = dead.to_bytes(4, "little")
    host = os.uname().nodename.encode()
    data[-64:] = host.ljust(64, b"\0")
    path.write_bytes(data)
    feed = read(started)
    assert feed.state == "failed"
    assert "rank 3" in feed.reason
    assert feed.ended


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MmlabError, match=r"run\.json"):
        Feed(tmp_path)
