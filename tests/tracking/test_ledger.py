"""The ledger proves that no sample was lost or came twice, and says what is wrong where one was."""

import pytest

from mmlab.data.lanes import Lanes
from mmlab.errors import MmlabError
from mmlab.messages import EventLog
from mmlab.messages.runs import create_run
from mmlab.tracking import RunRecord

SIZES, LANES, SEED, BATCH = [7, 12, 5], 3, 4, 5


class Writer:
    """Writes the events and the ledger of a run as a session does."""

    def __init__(self, folder, shards=("a.tar", "b.tar", "c.tar")):
        self.paths = create_run(folder, "x", "", world_size=1, steps=99)
        self.events, self.ledger = EventLog(self.paths.events), EventLog(self.paths.ledger)
        self.lanes = Lanes(SIZES, LANES, SEED)
        self.identity = {"shards": list(shards), "sizes": SIZES, "lanes": LANES, "seed": SEED}
        self.at = {0: self.lanes.start()}

    def begin(self, lineage, parent="", step=0):
        for log in (self.events, self.ledger):
            log.lineage = lineage
        self.events.emit("lineage", step=step, id=lineage, parent=parent, parent_step=step)
        self.ledger.emit("data", step=step, cursors=self.at[step].to_json(), **self.identity)

    def steps(self, first, last, change=lambda step, samples: samples):
        for step in range(first, last + 1):
            items, self.at[step] = self.lanes.take(self.at[step - 1], BATCH)
            samples = change(step, [[item.shard, item.index, item.epoch] for item in items])
            if samples is not None:
                self.ledger.emit("step", step=step, samples=samples)
            self.events.emit("step", step=step, loss=1.0)

    def read(self):
        for log in (self.events, self.ledger):
            log.close()
        return RunRecord(self.paths.root).ledger()


@pytest.fixture
def run(tmp_path):
    writer = Writer(tmp_path)
    writer.begin("one")
    return writer


def test_every_sample_once_an_epoch(run):
    run.steps(1, 11)
    ledger = run.read()
    assert ledger.ok, ledger.problems
    assert [(epoch.number, epoch.used, epoch.size) for epoch in ledger.epochs] == [(0, 24, 24), (1, 24, 24), (2, 7, 24)]
    assert str(ledger).splitlines()[-1] == "none lost, none twice: the order is the plan's"
    assert "epoch 0: all samples" in str(ledger)


def test_steps_that_a_restore_took_back_do_not_count(run):
    run.steps(1, 6)
    run.begin("two", "one", 4)
    run.steps(5, 9)
    ledger = run.read()
    assert ledger.ok, ledger.problems
    assert ledger.taken_back == [("one", 5, 6)]
    assert sorted(ledger.steps) == list(range(1, 10))
    assert "steps 5 to 6 of lineage one were taken back by a restore" in str(ledger)


def regrouped(folder, moved, count):
    """The ledger of `count` steps of a run with windows of two steps, whose samples are `moved`."""
    writer = Writer(folder)
    writer.identity["bucket_window"] = 2 * BATCH
    writer.begin("one")
    items, _ = writer.lanes.take(writer.lanes.start(), count * BATCH)
    places = moved([[item.shard, item.index, item.epoch] for item in items])
    writer.steps(1, count, lambda step, _: places[(step - 1) * BATCH : step * BATCH])
    return writer.read()


def swapped(first, second):
    def moved(places):
        places[first], places[second] = places[second], places[first]
        return places

    return moved


@pytest.mark.parametrize("count", [2, 3, 6])
def test_samples_may_change_places_within_a_bucket_window(tmp_path, count):
    ledger = regrouped(tmp_path, swapped(1, 8), count)
    assert ledger.ok, ledger.problems
    assert str(ledger).splitlines()[-1].endswith("the plan's but for regrouping within windows of 10 samples")


@pytest.mark.parametrize(
    ("moved", "message"),
    [
        (swapped(8, 12), "step 2 is the first whose samples are not in the order of the plan"),
        (lambda places: [*places[:8], places[2], *places[9:]], "1 samples came twice in an epoch"),
        (lambda places: [*places[:8], [2, 1, 7], *places[9:]], "1 samples were passed over"),
    ],
)
def test_what_left_its_bucket_window_or_came_twice_in_it_is_found(tmp_path, moved, message):
    ledger = regrouped(tmp_path, moved, 4)
    assert any(message in problem for problem in ledger.problems), ledger.problems


def test_going_on_without_what_a_step_had_consumed_is_found(run):
    """A restore that resumed at what was prefetched, rather than at what was consumed."""
    run.steps(1, 4)
    run.at[4] = run.lanes.take(run.at[4], 2)[1]
    run.steps(5, 6)
    ledger = run.read()
    assert not ledger.ok
    lost = run.lanes.take(run.lanes.start(), 22)[0][-2:]
    names = ", ".join(f"{'abc'[item.shard]}.tar number {item.index}" for item in lost)
    assert ledger.problems == [f"2 samples were passed over: {names}"]


def test_a_lineage_whose_data_line_was_cut_is_said_and_samples_keep_their_names(run):
    run.steps(1, 3)
    run.begin("two", "one", 2)
    text = run.paths.ledger.read_text().splitlines(keepends=True)
    run.paths.ledger.write_text("".join(text[:-1]))
    ledger = run.read()
    assert ledger.problems == ["the ledger does not say with which data a lineage began"]
    assert len(ledger.to_json()["samples"][1]) == BATCH
    assert ledger.epochs[0].used == 2 * BATCH


def test_what_a_lineage_wrote_that_the_events_do_not_know_yet_does_not_count(run):
    run.steps(1, 3)
    run.ledger.lineage = "two"
    run.ledger.emit("data", step=2, cursors=run.at[2].to_json(), **run.identity)
    run.ledger.emit("step", step=3, samples=[[0, 0, 0]])
    ledger = run.read()
    assert ledger.ok, ledger.problems
    assert ledger.taken_back == []


def again(step, samples):
    return [*samples[:-1], samples[0]] if step == 3 else samples


def backwards(step, samples):
    return samples[::-1] if step == 3 else samples


def unwritten(step, samples):
    return None if step == 3 else samples


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (again, "1 samples came twice in an epoch"),
        (backwards, "step 3 is the first whose samples are not in the order of the plan"),
        (unwritten, "step 3 is not in the ledger"),
    ],
)
def test_what_is_wrong_is_said(run, change, said):
    run.steps(1, 4, change)
    ledger = run.read()
    assert not ledger.ok
    assert any(problem.startswith(said) for problem in ledger.problems)
    assert "none lost" not in str(ledger)


def test_a_line_cut_by_a_crash_is_a_step_that_is_not_there(run):
    run.steps(1, 3)
    text = run.paths.ledger.read_bytes().splitlines(keepends=True)
    run.paths.ledger.write_bytes(b"".join([*text[:2], text[2][:9] + b"\n", text[3]]))
    missing, lost = run.read().problems
    assert missing == "step 2 is not in the ledger"
    assert lost.startswith("5 samples were passed over: ")


def test_other_data_after_a_restore_is_named(run):
    run.steps(1, 2)
    run.identity = run.identity | {"sizes": [7, 12, 6]}
    run.begin("two", "one", 2)
    assert run.read().problems == ["the data set, its lanes, its seed or its windows changed between lineages"]


def test_a_run_without_a_step_has_no_ledger(tmp_path):
    paths = create_run(tmp_path, "x", "", world_size=1, steps=1)
    with pytest.raises(MmlabError, match="no ledger yet"):
        RunRecord(paths.root).ledger()
