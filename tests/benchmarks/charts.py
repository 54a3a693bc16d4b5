"""What a point more costs a chart: kernel time and bytes against plotly's FigureWidget; and what a page needs.

Kernel: charts of 1,000, 10,000 and 100,000 steps get one step more, and the message is packed as a kernel packs it
(JSON and buffers). `mmlab` is the whole way: the step's line is read from the log, decoded, added to all curves, and
those in sight are sent (loss, tokens/s, images/s). plotly's FigureWidget with the same three curves has no way to
append, so it gets its arrays anew (`batch_update`). Both take turns; medians. Before that the run is opened.

Page (`--page`, needs Chromium): the time from the history's arrival in the page to the drawn curves, then the time
between frames while five steps a second arrive.

    python tests/benchmarks/charts.py [--appends 60] [--page] [--json FILE]
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import bench_report
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

POINTS = (1_000, 10_000, 100_000)
CURVES = ("loss", "tokens_per_s", "images_per_s")
PLAYED = 100
"""Steps that the synthetic run plays; it would need minutes for 100,000."""
LATE = 0.034
"""Seconds between frames from which a frame counts as late: two refreshes of a screen at 60 Hz."""


class Wire:
    """A comm that packs what it is given, as a kernel's session does, and counts."""

    def __init__(self, **_: Any) -> None:
        self.comm_id = "benchmark"
        self.bytes = 0

    def send(self, data: Any = None, metadata: Any = None, buffers: Any = None) -> None:
        """Pack and count."""
        packed = json.dumps(data, ensure_ascii=False, allow_nan=False).encode()
        self.bytes += len(packed) + sum(memoryview(buffer).nbytes for buffer in buffers or [])

    def on_msg(self, callback: Any) -> None:
        """Nobody answers."""

    on_close = on_msg

    def close(self, *_: Any, **__: Any) -> None:
        """Nothing to end."""


def run_of(folder: Path, steps: int) -> Any:
    """A run's folder with so many steps; from the 100th on, earlier lines with steps and losses of their own."""
    from ui.synthetic import SyntheticRun

    from mmlab.plan import Plan

    run = SyntheticRun(folder, Plan.preset("laptop").with_(f"train.steps={2 * steps}"), f"steps-{steps}")
    run.start()
    run.train(min(steps, PLAYED))
    if steps > PLAYED:
        lines = run.paths.events.read_text().splitlines()[-PLAYED:]
        heads = [line.partition('"step":')[0] for line in lines]
        tails = [line.partition(',"tokens":')[2] for line in lines]
        with open(run.paths.events, "a") as log:
            for step in range(PLAYED + 1, steps):
                loss = 0.9 + 6 * math.exp(-step / 4000) + run.random.uniform(-0.15, 0.15)
                log.write(f'{heads[step % PLAYED]}"step":{step},"loss":{loss},"tokens":{tails[step % PLAYED]}\n')
        run.step = steps - 1
        run.train(1)
    return run


class Mmlab:
    """The charts of a run, whose thread stands still: the benchmark takes its turns."""

    def __init__(self, run: Any) -> None:
        from ui.synthetic import InboxRun

        from mmlab.ui.dashboard import part
        from mmlab.ui.source import RunSource

        self.run = run
        self.part = part(RunSource(InboxRun(run.dir), run.dir), "charts")
        self.part._end.set()
        self.part.view.comm = self.wire = Wire()
        self.opened = self._open()
        self.wire.bytes = 0
        self.part._want_history.set()
        self.part._send()
        self.history_bytes = self.wire.bytes

    def _open(self) -> dict[str, float]:
        """Seconds of this process, and by the clock: to the first picture, to that of the whole log, and the longest
        look, for which others wait."""
        source, looks = self.part.source, []
        source.feed, source._looked = type(source.feed)(self.run.dir), float("-inf")
        processor, began = time.process_time(), time.perf_counter()
        found: dict[str, float] = {}
        while not found or source.reading is not None:
            look = time.perf_counter()
            source.look()
            looks.append(time.perf_counter() - look)
            if not found:
                self.part._send()
                found |= {"first": time.process_time() - processor, "first_clock": time.perf_counter() - began}
        self.part._send()
        found |= {"all": time.process_time() - processor, "all_clock": time.perf_counter() - began}
        return found | {"looks": len(looks), "longest_look": max(looks)}

    def append(self) -> tuple[float, int]:
        """Seconds and bytes of one step more."""
        self.run.train(1)
        self.part.source._looked = float("-inf")
        before, began = self.wire.bytes, time.perf_counter()
        self.part._look()
        self.part._send()
        return time.perf_counter() - began, self.wire.bytes - before


class Plotly:
    """A FigureWidget with the same curves."""

    def __init__(self, steps: int) -> None:
        import plotly.graph_objects as go

        self.x = np.arange(1, steps + 1, dtype=np.float64)
        self.y = [np.random.default_rng(index).random(steps).astype(np.float32) for index in range(len(CURVES))]
        self.figure = go.FigureWidget(
            [go.Scattergl(x=self.x, y=y, name=name) for name, y in zip(CURVES, self.y, strict=True)]
        )
        self.wire = Wire()
        self.figure.comm = self.wire

    def append(self) -> tuple[float, int]:
        """Seconds and bytes of one step more."""
        before, began = self.wire.bytes, time.perf_counter()
        self.x = np.append(self.x, self.x[-1] + 1)
        self.y = [np.append(y, np.float32(0.5)) for y in self.y]
        with self.figure.batch_update():
            for trace, y in zip(self.figure.data, self.y, strict=True):
                trace.x, trace.y = self.x, y
        return time.perf_counter() - began, self.wire.bytes - before


def kernel(run: Any, appends: int) -> dict[str, Any]:
    """Both sides, in turns."""
    points = run.step
    sides: dict[str, Any] = {"mmlab": Mmlab(run), "plotly": Plotly(points)}
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in sides}
    for turn in range(appends + 3):
        for name in ("mmlab", "plotly") if turn % 2 else ("plotly", "mmlab"):
            told = sides[name].append()
            if turn >= 3:  # caches are warm then
                found[name].append(told)
    row: dict[str, Any] = {"points": points} | sides["mmlab"].opened
    row["history_bytes"] = sides["mmlab"].history_bytes
    for name, told in found.items():
        row[f"{name}_ms"] = 1e3 * statistics.median(seconds for seconds, _ in told)
        row[f"{name}_bytes"] = statistics.median(count for _, count in told)
    row["time_ratio"] = row["plotly_ms"] / row["mmlab_ms"]
    row["bytes_ratio"] = row["plotly_bytes"] / row["mmlab_bytes"]
    return row


FRAMES = """() => { window.gaps = []; let last = performance.now();
  const next = (now) => { window.gaps.push(now - last); last = now; window.going = requestAnimationFrame(next); };
  requestAnimationFrame((now) => { last = now; next(now); }); }"""
PAINTED = """async (steps) => {
  const drawn = () => [...document.querySelectorAll(".mm-legend")].some((each) => each.textContent.includes(steps));
  while (!drawn()) await new Promise((done) => requestAnimationFrame(done));
  await new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)));
  return performance.now() - window.began; }"""


def page(run: Any, seconds: float = 6.0) -> dict[str, Any]:
    """Milliseconds to the drawn curves, and between frames while steps arrive."""
    from ui.stage import Stage, browser_page
    from ui.synthetic import InboxRun

    from mmlab.ui.dashboard import part
    from mmlab.ui.source import RunSource

    points = run.step
    with browser_page(1200, 700) as tab:
        charts = part(RunSource(InboxRun(run.dir), run.dir), "charts")
        charts.source.look()
        tab.evaluate("window.began = performance.now()")
        stage = Stage(tab, charts)
        end = time.monotonic() + 60
        while not stage.sent and time.monotonic() < end:
            time.sleep(0.01)
        tab.evaluate("window.began = performance.now()")
        stage.pump()
        drawn = tab.evaluate(PAINTED, f"{points:,}")
        tab.wait_for_timeout(1_000)
        tab.evaluate(FRAMES)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            run.train(1)
            tab.wait_for_timeout(200)
            stage.pump()
        gaps = sorted(tab.evaluate("window.gaps"))[1:]
        errors = list(stage.errors)
        charts.close()
    if errors:
        raise RuntimeError(f"the page said {errors}")
    late = sum(gap > 1e3 * LATE for gap in gaps)
    return {
        "points": points, "first_paint_ms": drawn, "frames": len(gaps), "gap_ms": statistics.median(gaps),
        "gap_ms_95": gaps[int(0.95 * len(gaps))], "gap_ms_most": gaps[-1], "late_percent": 100 * late / len(gaps),
    }  # fmt: skip


def tell_kernel(row: dict[str, Any]) -> None:
    """Print both sides and the ratios of their medians."""
    print(
        f"{row['points']:>7,} points: mmlab {row['mmlab_ms']:.2f} ms, {row['mmlab_bytes']:,.0f} bytes; plotly "
        f"{row['plotly_ms']:.2f} ms, {row['plotly_bytes']:,.0f} bytes; plotly / mmlab: time {row['time_ratio']:.1f}, "
        f"bytes {row['bytes_ratio']:,.0f}; history {row['history_bytes']:,} bytes",
        f"\n        opened: first picture after {row['first']:.3f} s of the processor ({row['first_clock']:.3f} by the "
        f"clock), the whole log after {row['all']:.2f} ({row['all_clock']:.2f}) in {row['looks']} looks of at most "
        f"{1e3 * row['longest_look']:.0f} ms",
        flush=True,
    )


def tell_page(row: dict[str, Any]) -> None:
    """Print what a page needs."""
    print(
        f"{row['points']:>7,} points in a page: drawn {row['first_paint_ms']:.0f} ms after the history came; frames "
        f"every {row['gap_ms']:.1f} ms (95 %: {row['gap_ms_95']:.1f}, longest {row['gap_ms_most']:.1f}), "
        f"{row['late_percent']:.1f} % late",
        flush=True,
    )


def main() -> None:
    """Measure and print."""
    parser = bench_report.parser(__doc__)
    parser.add_argument("--appends", type=int, default=60, help="steps appended to each chart")
    parser.add_argument("--page", action="store_true", help="measure a page too")
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="mmlab-charts-") as folder:
        for points in POINTS:
            run = run_of(Path(folder), points)
            rows.append(kernel(run, arguments.appends))
            tell_kernel(rows[-1])
            if arguments.page:
                rows.append(page(run))
                tell_page(rows[-1])
            run.close()
    bench_report.keep(rows, arguments.json)


if __name__ == "__main__":
    main()
