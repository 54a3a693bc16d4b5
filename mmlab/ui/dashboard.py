"""The dashboard of a run in a notebook: live board, and a picture that stays when the notebook is saved.

A background thread reads the run's folder and feeds the board, so cells, training
and dashboard never wait for one another.
"""

from __future__ import annotations

import contextvars
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from uuid import uuid4

from mmlab.messages import PHASES, Event
from mmlab.ui.charts import Board
from mmlab.ui.controls import Controls, Steerable
from mmlab.ui.feed import CURVES, Feed
from mmlab.ui.series import CAPACITY
from mmlab.ui.snapshot import Snapshot, of_feed
from mmlab.ui.words import clock, compression_text, data_text, event_text

PERIOD = 0.2
"""Seconds between messages to the board: five a second, of the ten that the server bears."""
UNSEEN_PERIOD = 2.0
"""Seconds between messages when no view has been heard of: a server keeps messages for closed browsers."""
SEEN_FOR = 30.0
"""Seconds for which a view counts as there (views tell every ten, unless a cell keeps the kernel busy)."""
EVENTS = 30
"""Last events on the board."""
PHASES_EVERY = 1.0
"""Seconds between changes of the phase bars."""


class Dashboard:
    """The live view of one run.

    `board` is the widget. `show()` displays it in a cell together with a picture and text, which are replaced through
    the display id at pause, and by the picture alone when the run has ended. `close()` ends the thread.
    """

    def __init__(self, run: Steerable, run_dir: Path | str, period: float = PERIOD) -> None:
        self.board = Board()
        self.controls = Controls(run, Path(run_dir))
        self.feed = Feed(run_dir)
        self._period = period
        self._points: dict[str, list[tuple[float, float]]] = {name: [] for name in CURVES}
        self._phases: dict[str, Any] = {}
        self._phases_at = 0.0
        self._cuts = 0
        self._want_history = threading.Event()
        self._seen = time.monotonic()
        self._displays: list[str] = []
        self._shown_state = ""
        self._end = threading.Event()
        self._lock = threading.Lock()
        self.board.on_msg(self._heard)
        self._look()
        # In the context of the cell: ipykernel 7.4 routes what views send to the subshell of the request that the
        # kernel's last message to them names as its parent. Without a context that is whatever request came last,
        # after a page reload one of a deleted subshell, and then every button is dead.
        work = contextvars.copy_context().run
        self._thread = threading.Thread(target=work, args=(self._work,), name="mmlab dashboard", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether the run had ended when last looked at, so that nothing will change."""
        return not self._thread.is_alive()

    def close(self) -> None:
        """End the background thread."""
        self._end.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(5)

    def show(self) -> None:
        """Display in the current cell. Returns at once."""
        display_id = uuid4().hex
        with self._lock:
            data, metadata = self.bundle()
            publish(data, metadata, display_id)
            self._displays.append(display_id)

    def bundle(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a cell holds: picture and text, with the live board while the run goes on; and the metadata."""
        data, metadata = self.snapshot().bundle()
        if not self.feed.ended:
            view = self.board._repr_mimebundle_()
            widget = view[0] if isinstance(view, tuple) else view
            data |= {key: value for key, value in (widget or {}).items() if "widget-view" in key}
        return data, metadata

    def snapshot(self) -> Snapshot:
        """The picture of the run as this dashboard knows it."""
        return of_feed(self.feed)

    def _heard(self, _: Any, message: dict[str, Any], __: Any) -> None:
        """A message of a view, on whichever thread the kernel chooses."""
        self._seen = time.monotonic()
        kind = message.get("kind")
        if kind == "hello":
            self._want_history.set()
        elif kind == "command":
            self.controls.handle(message)

    def _work(self) -> None:
        sent = 0.0
        while not self._end.wait(self._period):
            with self._lock:
                self._look()  # often, also unseen: a saved notebook is to show the end, and may be saved right after it
                if self.feed.ended or time.monotonic() - sent >= self._pause():
                    sent = time.monotonic()
                    self._send()
                self._renew()
                if self.feed.ended:
                    self.board.close()
                    return

    def _pause(self) -> float:
        return self._period if time.monotonic() - self._seen < SEEN_FOR else max(self._period, UNSEEN_PERIOD)

    def _look(self) -> None:
        self.feed.read(self._collect)
        self.feed.look()

    def _collect(self, event: Event) -> None:
        """Note new points; a view that is far behind gets the history instead."""
        if event.get("kind") not in ("step", "eval"):
            return
        names = {"loss": "held_out", "loss_swapped": "swapped"} if event["kind"] == "eval" else {n: n for n in CURVES}
        for field, name in names.items():
            if event.get(field) is not None:
                self._points[name].append((float(event["step"]), float(event[field])))
        if len(self._points["loss"]) > CAPACITY:
            self._want_history.set()
            self._clear()

    def _clear(self) -> None:
        for points in self._points.values():
            points.clear()

    def _send(self) -> None:
        """One message to all views, at most: the history where one asked for it or the lineage changed."""
        frame = self.frame()
        if self._want_history.is_set() or self.feed.cuts != self._cuts:
            self._want_history.clear()
            self._cuts = self.feed.cuts
            self.board.send_history(frame, self.feed.curves)
        else:
            self.board.send_tick(frame, self._points)
        self._clear()

    def _renew(self) -> None:
        """Replace what the cells hold when the run pauses or ends, so that a saved notebook shows that."""
        state = self.feed.state
        if state == self._shown_state:
            return
        self._shown_state = state
        if state == "paused" or self.feed.ended:
            data, metadata = self.bundle()
            for display_id in self._displays:
                # Outside the cell's context: nbclient takes updates only from the request that runs just now, and
                # JupyterLab finds the output by its display id whatever the request.
                contextvars.Context().run(publish, data, metadata, display_id, True)

    def frame(self) -> dict[str, Any]:
        """The state of the run as the board shows it (JSON)."""
        feed, last = self.feed, self.feed.last
        seconds = last.get("seconds")
        held_out = feed.curves["held_out"].last
        return {
            "name": feed.paths.root.name,
            "state": feed.state,
            "doing": feed.doing,
            "reason": feed.reason,
            "step": feed.step,
            "steps": feed.steps,
            "loss": _finite(last.get("loss")),
            "held_out": _finite(held_out[1] if held_out else None),
            "tokens_per_s": last.get("tokens_per_s"),
            "images_per_s": last.get("images_per_s"),
            "seconds": seconds,
            "data": data_text(last),
            "left": seconds * max(0, feed.steps - feed.step) if seconds else None,
            "compression": compression_text(last),
            "rates": self._rates(),
            "phases": self._phase_bars(),
            "events": [_line(event) for event in list(feed.recent)[-EVENTS:]],
            "heard": self.controls.heard(),
            "waiting": self.controls.waiting(),
            "acked": next((_acked(event) for event in reversed(feed.recent) if event["kind"] == "command"), None),
        }

    def _rates(self) -> dict[str, dict[str, Any]]:
        now: Mapping[str, float] = self.feed.last.get("lr") or {}
        return {
            name: {"base": base, "now": now.get(name), "frozen": getattr(self.feed.plan.train, name).frozen}
            for name, base in self.feed.rates.items()
        }

    def _phase_bars(self) -> dict[str, Any]:
        """Milliseconds by rank and used phase, renewed once a second."""
        if time.monotonic() - self._phases_at > PHASES_EVERY or not self._phases:
            rows = self.feed.phases()
            used = [index for index in range(len(PHASES)) if any(row[index] > 0 for row in rows)]
            bars = [[round(1000 * row[index], 2) for index in used] for row in rows]
            names = [PHASES[index] for index in used]
            self._phases = {"names": names, "roles": self.feed.roles(), "rows": bars} if rows else {}
            self._phases_at = time.monotonic()
        return self._phases


def _finite(value: float | None) -> float | str | None:
    """A number that JSON can carry; the words nan and inf for those it cannot."""
    return value if value is None or abs(value) < float("inf") else str(value)


def _line(event: Event) -> dict[str, Any]:
    refused = event["kind"] == "command" and not event.get("ok")
    began = event["kind"] == "recovery" and not event.get("done")
    bad = refused or began or event["kind"] in ("warning", "bad_image") or event.get("state") == "failed"
    return {"time": clock(event), "text": event_text(event), "bad": bad}


def _acked(event: Event) -> dict[str, Any]:
    return {"text": event_text(event), "ok": bool(event.get("ok"))}


def publish(data: dict[str, Any], metadata: dict[str, Any], display_id: str = "", update: bool = False) -> None:
    """Put a bundle into the current cell's output, or replace it wherever the display id stands."""
    from IPython.display import publish_display_data

    transient = {"display_id": display_id} if display_id else {}
    publish_display_data(data, metadata, transient=transient, update=update)
