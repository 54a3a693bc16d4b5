"""Curves of a run, and of others beside it: loss, throughput, gradient norms, learning rates, waiting, phases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from mmlab.errors import MmlabError
from mmlab.messages import Event, RunPaths
from mmlab.plan.tables import text_table
from mmlab.ui.feed import Feed, curve_points
from mmlab.ui.panel import Reply, RunPanel
from mmlab.ui.panels.stills import still_charts
from mmlab.ui.series import CAPACITY, Series
from mmlab.ui.snapshot import spark
from mmlab.ui.source import RunSource
from mmlab.ui.view import Points, packed
from mmlab.ui.words import number

CHARTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "loss": ("Loss", ("loss", "held_out")),
    "throughput": ("Throughput", ("tokens_per_s", "images_per_s")),
    "norms": ("Gradient norms", ("grad_norm_total", "grad_norm.")),
    "rates": ("Learning rates", ("lr.",)),
    "wait": ("Data wait (s)", ("data_wait",)),
    "phases": ("Time per phase (ms a step, mean of ranks)", ("phase.",)),
}
"""The charts there are: title, and curves of the feed (a name that ends with a dot stands for all that begin so)."""
MOST_OTHERS = 4
"""Runs overlaid at most: so many dashes can be told apart."""
LISTED = 50
"""Runs offered for comparison."""


def names_of(charts: Iterable[str], known: Iterable[str]) -> list[str]:
    """The known curves that these charts draw, in their order."""
    stems = [stem for chart in charts for stem in CHARTS[chart][1]]
    return [name for stem in stems for name in known if name == stem or (stem[-1] == "." and name.startswith(stem))]


class Track:
    """The curves of one run in charts; `suffix` tells them from those of others."""

    def __init__(self, source: RunSource, suffix: str = "") -> None:
        self.source = source
        self.suffix = suffix
        self._new: list[Event] = []
        self._many = False
        self._cuts = source.cuts
        source.listen(self._collect)

    @property
    def feed(self) -> Feed:
        """What the run's folder says."""
        return self.source.feed

    def curves(self, charts: Iterable[str]) -> dict[str, Series]:
        """All of it; what has come so far counts as told."""
        self._new, self._many, self._cuts = [], False, self.source.cuts
        return {name + self.suffix: self.feed.curves[name] for name in names_of(charts, self.feed.curves)}

    def points(self, charts: Iterable[str]) -> dict[str, list[tuple[float, float]]] | None:
        """What came since; None when all of it is better told anew."""
        if self._many or self.source.cuts != self._cuts:
            self._new, self._many, self._cuts = [], False, self.source.cuts
            return None
        events, self._new = self._new, []
        found: dict[str, list[tuple[float, float]]] = {}
        for event in events:
            for name, value in curve_points(event):
                found.setdefault(name, []).append((float(event.get("step", self.feed.step)), value))
        return {name + self.suffix: found[name] for name in names_of(charts, found)}

    def close(self) -> None:
        """Listen no longer."""
        self.source.unlisten(self._collect)

    def _collect(self, event: Event) -> None:
        if event.get("kind") in ("step", "eval") and not self._many:
            self._new.append(event)
            if len(self._new) > CAPACITY:
                self._new, self._many = [], True


class Charts(RunPanel):
    """Curves by step, with marks where something happened; which charts are in sight is a choice."""

    name = "charts"
    title = "Charts"
    spoken = ("marks.*.2",)
    slow = frozenset({"range", "runs", "overlay"})

    def __init__(self, source: RunSource) -> None:
        super().__init__(source)
        self.shown = ["loss", "throughput"]
        self.smoothing = 5.0
        self.log = False
        self._track = Track(source)
        self._others: list[Track] = []
        self._anew = False
        self._count = 0

    def frame(self) -> dict[str, Any]:
        """What is chosen, what happened, and which runs are overlaid: [suffix of their curves, name]."""
        others = [[other.suffix, other.feed.paths.root.name] for other in self._others]
        options = {"shown": list(self.shown), "smoothing": self.smoothing, "log": self.log}
        return options | {"others": others, "marks": list(self.feed.marks)}

    def curves(self) -> Mapping[str, Series]:
        """Those of the charts in sight."""
        self._anew = False
        return {name: series for track in self._tracks for name, series in track.curves(self.shown).items()}

    def points(self) -> Points | None:
        """What the steps and evaluations that came since add to the charts in sight."""
        found: dict[str, list[tuple[float, float]]] = {}
        for track in self._tracks:
            if track is not self._track and not track.source.ended:
                track.source.look()
            new = track.points(self.shown)
            self._anew |= new is None
            found |= new or {}
        return None if self._anew else found

    @property
    def _tracks(self) -> list[Track]:
        return [self._track, *self._others]

    def handle(self, verb: str, args: dict[str, Any]) -> Any:
        """`set` (shown, smoothing, log), `range` (low, high: those steps in more detail), `runs` (names of others),
        `overlay` (names of others)."""
        if verb == "set":
            self.set(**{key: args[key] for key in ("shown", "smoothing", "log") if key in args})
            return None
        if verb == "range":
            return self.closer(float(args["low"]), float(args["high"]))
        if verb == "runs":
            return [path.name for path in self.siblings()]
        if verb == "overlay":
            known = {path.name: path for path in [*self.siblings(), *(o.feed.paths.root for o in self._others)]}
            unknown = [name for name in args["runs"] if name not in known]
            if unknown:
                raise ValueError(f"no run {', '.join(map(str, unknown))} beside this one")
            self.overlay([known[name] for name in args["runs"]])
            return None
        raise ValueError(f"unknown request {verb!r}")

    def set(self, shown: Iterable[str] | None = None, smoothing: float | None = None, log: bool | None = None) -> None:
        """Choose charts (names of CHARTS), smoothing (percent of the steps in sight) and logarithmic scales."""
        chosen = self.shown if shown is None else [str(name) for name in shown]
        if unknown := [name for name in chosen if name not in CHARTS]:
            raise ValueError(f"no chart {', '.join(unknown)}; there are {', '.join(CHARTS)}")
        percent = self.smoothing if smoothing is None else float(smoothing)
        if not 0 <= percent <= 50:
            raise ValueError(f"smoothing is a share of the steps in sight from 0 to 50 percent, not {smoothing}")
        with self.source.lock:
            self._anew |= set(chosen) != set(self.shown)
            self.shown = [name for name in CHARTS if name in chosen]
            self.smoothing = percent
            self.log = self.log if log is None else bool(log)

    def overlay(self, folders: Iterable[Path]) -> None:
        """Draw these runs (and no others) beside this one. MmlabError where one is no run or there are too many."""
        wanted = list(dict.fromkeys(Path(folder).absolute() for folder in folders))
        if len(wanted) > MOST_OTHERS:
            raise MmlabError(f"at most {MOST_OTHERS} runs are drawn beside this one, not {len(wanted)}")
        kept = {other.feed.paths.root.absolute(): other for other in self._others}
        new = {path: RunSource(None, path) for path in wanted if path not in kept}
        for source in new.values():
            source.look()  # before it is drawn: reading a long run takes a second
        with self.source.lock:
            for path, source in new.items():
                self._count += 1
                kept[path] = Track(source, f"@{self._count}")
            for path in kept.keys() - set(wanted):
                kept[path].close()
            self._others = [kept[path] for path in wanted]
            self._anew = True

    def siblings(self) -> list[Path]:
        """The folders of other runs in the same place, newest first."""
        own = self.feed.paths.root.absolute()
        runs = [path for path in own.parent.iterdir() if RunPaths(path).run.is_file() and path != own]
        return sorted(runs, key=lambda path: path.name, reverse=True)[:LISTED]

    def closer(self, low: float, high: float) -> Reply:
        """The charts in sight from step to step, in more detail than the whole run has."""
        if not low <= high:
            raise ValueError(f"steps {low} to {high} are no range")
        found = {}
        for track in self._tracks:
            with track.source.lock:  # copies of what the thread of a part adds to
                names = names_of(self.shown, track.feed.curves)
                near = track.feed.near(names, low, high)
            for name, series in (track.feed.closer(names, low, high) if near is None else near).items():
                found[name + track.suffix] = series.points()
        sizes, buffers = packed(found)
        return Reply({"low": low, "high": high, "curves": sizes}, buffers)

    def text(self) -> str:
        """The loss in block characters; last, lowest and highest value of each curve in sight."""
        values = list(self.feed.curves["loss"].points()[1])
        return f"loss {spark(values)} {number(values[-1] if values else None, 4)}\n\n{text_table(*self._figures())}"

    def html(self) -> str:
        """The charts in sight, drawn."""
        tracks = [(track.feed.paths.root.name, track.feed) for track in self._tracks]
        return still_charts(tracks, {chart: CHARTS[chart] for chart in self.shown}, names_of)

    def _figures(self) -> tuple[list[str], list[list[str]]]:
        rows = []
        for track in self._tracks:
            for name in names_of(self.shown, track.feed.curves):
                values = [value for value in track.feed.curves[name].points()[1] if abs(value) < float("inf")]
                if values:
                    run = f" {track.feed.paths.root.name}" if track.suffix else ""
                    rows.append([name + run, number(values[-1]), number(min(values)), number(max(values))])
        return ["curve", "last", "lowest", "highest"], rows

    def close(self) -> None:
        """Listen no longer."""
        for track in self._tracks:
            track.close()
