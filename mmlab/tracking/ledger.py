"""The ledger of a run: which samples each step consumed, and whether none was lost and none came twice.

`<run>/ledger.jsonl`, written by rank 0 as each step ends. A line of kind "data" opens each lineage: shards (paths),
sizes (samples of each), what else `DataSource.identity` says, and the cursors that it begins with; a line of kind
"step" holds its samples as [shard, position in it, epoch], in order. Prefetched samples that no step has consumed are
not in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmlab.errors import MmlabError
from mmlab.messages.events import Event, last_steps, read_events

if TYPE_CHECKING:
    from mmlab.data.order import Order
    from mmlab.tracking.record import RunRecord

SHOWN = 3
"""Samples that a problem names."""
Place = tuple[int, int, int]
"""Shard, position in it, epoch."""


@dataclass(frozen=True)
class Epoch:
    """What the run has consumed of one pass over one source."""

    source: int
    """Which of the plan's sources, from 0."""
    number: int
    used: int
    """Samples consumed."""
    size: int
    """Samples that a whole pass has."""


class Ledger:
    """The samples that led to where a run stands; shows as a proof, or as what is wrong.

    `steps[number]` the samples of each step of the current lineage, in order; `epochs` what was consumed of each pass;
    `taken_back` steps that were done and then given up by a restore, as (lineage, first, last); `problems` what is
    wrong, empty when every sample that came before the last one in the order was consumed exactly once.
    """

    def __init__(self, record: RunRecord) -> None:
        lineages = record.lineages()  # first: what is known of a run that goes on is then in the ledger
        known = {event["id"] for event in record.events() if event["kind"] == "lineage"}
        lines = [line for line in read_events(record.paths.ledger)[0] if line["lineage"] in known]
        self._data = {line["lineage"]: line for line in lines if line["kind"] == "data"}
        if not self._data:
            raise MmlabError(f"run {record.id} has no ledger yet: it is begun with the first step")
        self._newest = next((self._data[e["id"]] for e in lineages if e["id"] in self._data), lines[0])
        self.steps: dict[int, list[Place]] = {}
        self.taken_back: list[tuple[str, int, int]] = []
        self.problems: list[str] = []
        self._scanned: dict[Path, list[tuple[str, str]]] = {}
        self._read(lines, lineages)
        self.epochs = self._count()
        self._prove(lineages)

    @property
    def ok(self) -> bool:
        """Whether nothing was lost and nothing came twice."""
        return not self.problems

    @property
    def used(self) -> int:
        """Samples consumed, over all epochs."""
        return sum(len(samples) for samples in self.steps.values())

    def _read(self, lines: list[Event], lineages: list[Event]) -> None:
        """Sort the steps into those that count and those that a restore took back."""
        last = last_steps(lineages)
        back: dict[str, list[int]] = {}
        for line in (line for line in lines if line["kind"] == "step"):
            number, lineage_id = int(line["step"]), line["lineage"]
            if number > last.get(lineage_id, -1):
                back.setdefault(lineage_id, []).append(number)
            elif number in self.steps:
                self.problems.append(f"step {number} is in the ledger twice")
            else:
                self.steps[number] = [(shard, index, epoch) for shard, index, epoch in line["samples"]]
        self.taken_back = [(lineage, min(numbers), max(numbers)) for lineage, numbers in back.items()]

    def _count(self) -> list[Epoch]:
        order = _order(self._newest)
        used: Counter[tuple[int, int]] = Counter()
        for shard, _, epoch in (place for samples in self.steps.values() for place in samples):
            used[order.source_of(shard), epoch] += 1
        sizes = [sum(source.sizes) for source in order.sources]
        return [Epoch(source, epoch, used[source, epoch], sizes[source]) for source, epoch in sorted(used)]

    def _prove(self, lineages: list[Event]) -> None:
        """Compare what was consumed with the order that the data, the lanes and the seed give."""
        path = [self._data[entry["id"]] for entry in reversed(lineages) if entry["id"] in self._data]
        if len(path) < len(lineages):
            self.problems.append("the ledger does not say with which data a lineage began")
            return
        if any(_order_of(line) != _order_of(path[0]) for line in path):
            self.problems.append("the data set, its lanes, its seed or its windows changed between lineages")
            return
        numbers = range(path[0]["step"] + 1, max(self.steps, default=0) + 1)
        self.problems += [f"step {number} is not in the ledger" for number in numbers if number not in self.steps]
        found = [place for number in sorted(self.steps) for place in self.steps[number]]
        twice = [place for place, count in Counter(found).items() if count > 1]
        wanted = _in_order(path[0], found)
        used = set(found)
        lost = [place for place in wanted if place not in used]
        for places, what in ((twice, "came twice in an epoch"), (lost, "were passed over")):
            if places:
                self.problems.append(f"{len(places)} samples {what}: {', '.join(map(self.name, places[:SHOWN]))}")
        if not self.problems and found != wanted:
            step = next(n for n, place in self._placed() if place != wanted.pop(0))
            self.problems.append(f"step {step} is the first whose samples are not in the order of the plan")

    def _placed(self) -> Iterator[tuple[int, Place]]:
        return ((number, place) for number in sorted(self.steps) for place in self.steps[number])

    # -- samples by name

    def name(self, place: Place) -> str:
        """A sample as `shard/key`, or by its position in the shard where that cannot be read any more."""
        shard, index, _ = place
        path = Path(self._newest["shards"][shard])
        kind = self._newest["kinds"][shard] if "kinds" in self._newest else ""
        keys = [key for key, of in self._keys(path) if kind in ("", of)]
        return f"{path.name}/{keys[index]}" if index < len(keys) else f"{path.name} number {index}"

    def _keys(self, path: Path) -> list[tuple[str, str]]:
        """(key, kind) of each sample of a shard."""
        from mmlab.data.shards import scan_shard

        if path not in self._scanned:
            try:
                kinds = ("text", "images")
                self._scanned[path] = [(sample.key, kinds[bool(sample.images)]) for sample in scan_shard(path)]
            except MmlabError:
                self._scanned[path] = []
        return self._scanned[path]

    def samples(self, step: int) -> list[str]:
        """The samples of a step of the current lineage, in order. MmlabError where the ledger has no such step."""
        if step not in self.steps:
            there = f"{min(self.steps)} to {max(self.steps)}" if self.steps else "none"
            raise MmlabError(f"step {step} is not in the ledger; there are: {there}")
        return [self.name(place) for place in self.steps[step]]

    # -- shown

    @property
    def lines(self) -> list[str]:
        """What the ledger says, one sentence each."""
        if not self.steps:
            return ["no step has been done"]
        first, last = min(self.steps), max(self.steps)
        told = [f"steps {first} to {last}: {self.used} samples"]
        several = len({epoch.source for epoch in self.epochs}) > 1
        for epoch in self.epochs:
            whole = "all" if epoch.used == epoch.size else f"{epoch.used} of {epoch.size}"
            told.append(f"{self._source(epoch.source) * several}epoch {epoch.number}: {whole} samples")
        for lineage, start, end in self.taken_back:
            told.append(f"steps {start} to {end} of lineage {lineage} were taken back by a restore")
        window = self._newest.get("bucket_window", 0)
        within = f" but for regrouping within windows of {window} samples" if window else ""
        return told + (self.problems or [f"none lost, none twice: the order is the plan's{within}"])

    def _source(self, number: int) -> str:
        """What an epoch is of, where there are several sources (with a share of text, text and images are one each)."""
        kind = self._newest["kinds"][_order(self._newest).first[number]] if "kinds" in self._newest else ""
        return f"source {number} ({kind}), " if kind else f"source {number}, "

    def to_json(self) -> dict[str, Any]:
        """The ledger as JSON values: "ok", "problems", "epochs", "taken_back", "samples" {step: names}."""
        return {
            "ok": self.ok,
            "problems": self.problems,
            "epochs": [vars(epoch) for epoch in self.epochs],
            "taken_back": [list(entry) for entry in self.taken_back],
            "samples": {step: self.samples(step) for step in sorted(self.steps)},
        }

    def __str__(self) -> str:
        return "\n".join(self.lines)

    def __repr__(self) -> str:
        return str(self)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        html = "".join(f"<p>{escape(line)}</p>" for line in self.lines)
        return {"text/plain": str(self), "text/html": html}


def _order_of(line: Event) -> list[Any]:
    """What the order of samples depends on, from a ledger's data line."""
    names = [Path(shard).name for shard in line["shards"]]
    return [names, line.get("kinds", [""] * len(names)), line.get("bucket_window", 0), _order(line).identity()]


def _order(line: Event) -> Order:
    """The order of samples, from a ledger's data line."""
    from mmlab.data.order import Order

    return Order.of(line)


def _in_order(line: Event, found: list[Place]) -> list[Place]:
    """As many samples as were found, from the cursors of a data line on; a bucket window, which is regrouped by what
    only the data themselves tell, as it was found where all that was found in it belongs there."""
    from mmlab.data.order import Position

    window, start = line.get("bucket_window", 0), Position.from_json(line["cursors"])
    missing = start.grouped  # consumed of the first window before the line
    count = -(-(missing + len(found)) // window) * window if window else len(found)
    items, _ = _order(line).take(start, count)
    places = [(item.shard, item.index, item.epoch) for item in items]
    if not window:
        return places
    wanted: list[Place] = []
    for first in range(0, count, window):
        here = found[len(wanted) : first + window - missing]
        whole = places[first : first + window]
        wanted += here if len(set(here)) == len(here) and set(here) <= set(whole) else whole[: len(here)]
    return wanted
