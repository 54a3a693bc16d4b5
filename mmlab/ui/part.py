"""Panels in a cell: the live view, and what stays when the notebook is saved.

A background thread looks and feeds the view, so cells, training and views never wait
for one another.
"""

from __future__ import annotations

import contextvars
import os
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from html import escape
from typing import Any
from uuid import uuid4

from mmlab.errors import MmlabError
from mmlab.messages.files import whole
from mmlab.ui.language import language, spoken
from mmlab.ui.panel import Panel, Reply
from mmlab.ui.series import Series
from mmlab.ui.source import Source
from mmlab.ui.view import View

PERIOD = 0.2
"""Seconds between messages to the view: five a second, of the ten that the server bears."""
UNSEEN_PERIOD = 2.0
"""Seconds between messages when no page has been heard of: a server keeps messages for closed browsers."""
STILL_EVERY = 60.0
"""Seconds after which the picture for a page without a kernel is renewed, also in the cell (`OUTLIVES`); the
dashboard's takes 0.35 s of processor time and 120 kB."""
OUTLIVES = "application/vnd.mmlab.view+json"
"""In a cell's bundle beside a live view: our JupyterLab extension shows the picture where no kernel has the view, and
takes a new picture without drawing the view anew."""
MOST_STILL = 24_000
"""Characters of that picture; larger ones are told in text, since each part saves its own."""
FILLING_PERIOD = 0.5
"""Seconds between messages while a long log is read: each carries all curves."""
BREATH = 0.005
"""Seconds between looks while a long log is read: cells and buttons get their turn."""
WHOLE = "part"
"""The frame of the part itself: "reading", how many percent of a long log have been read (None: all)."""
SEEN_FOR = 30.0
"""Seconds for which a page counts as there (pages tell every ten, unless a cell keeps the kernel busy)."""


class Part:
    """Some panels of one source as one object: last in a cell it shows them live, in a terminal as text.

    `view` is the widget, made when first shown. `close()` ends the thread and leaves a still picture.
    """

    def __init__(
        self,
        source: Source,
        panels: Sequence[Panel],
        label: str,
        arrangement: str = "stack",
        shown: Iterable[str] | None = None,
        period: float = PERIOD,
    ) -> None:
        self.source = source
        self.panels = {panel.name: panel for panel in panels}
        self._label, self._arrangement = label, arrangement
        self._shown = set(self.panels if shown is None else shown)
        self._period = period
        self._view: View | None = None
        self._frames: dict[str, tuple[float, dict[str, Any]]] = {}
        self._cuts = 0
        self._filling = self._filled = False
        self._want_history = threading.Event()
        self._want_history.set()
        self._seen = time.monotonic()
        self._pages: dict[str, tuple[float, set[str]]] = {}
        self._language = language(os.environ.get("MMLAB_LANGUAGE", ""))
        self._displays: list[str] = []
        self._renewable = False
        self._published: dict[str, Any] = {}
        self._shown_state = ""
        self._kept_still = time.monotonic()
        self._end = threading.Event()
        self._lock = threading.RLock()
        self._thread: threading.Thread | None = None

    @property
    def view(self) -> View:
        """The widget; making it starts the thread that feeds it."""
        with self._lock:
            if self._view is None:
                self._view = View(self.panels, self._label, self._arrangement)
                self._view.on_msg(self._heard)
                self._look()
                self._shown_state = self._end_shown()
                # In the context of the cell: ipykernel 7.4 routes what pages send to the subshell of the request that
                # the kernel's last message to them names as its parent. Without a context that is whatever request
                # came last, after a page reload one of a deleted subshell, and then every button is dead.
                work = contextvars.copy_context().run
                self._thread = threading.Thread(target=work, args=(self._work,), name="mmlab view", daemon=True)
                self._thread.start()
            return self._view

    @property
    def lasting(self) -> bool:
        """Whether it stays live after the source's end."""
        return any(panel.lasting for panel in self.panels.values())

    @property
    def over(self) -> bool:
        """Whether the view is closed, so that nothing will change."""
        return self._end.is_set()

    def close(self) -> None:
        """End the thread; cells keep a still picture."""
        with self._lock:
            if not self._end.is_set():
                self._finish()
        if self._thread is not None and threading.current_thread() is not self._thread:
            self._thread.join(5)

    def show(self) -> None:
        """Display in the current cell. Returns at once."""
        display_id = uuid4().hex
        with self._lock:
            data, metadata = self.bundle()
            publish(data, metadata, display_id)
            self._published = {} if self._displays else data  # others may hold an older one
            self._displays.append(display_id)

    def _ipython_display_(self) -> None:
        self.show()

    def __repr__(self) -> str:
        with self._lock, self.source.lock:
            if self._thread is None:
                self._look_at_all()
            return "\n\n".join(panel.text() for panel in self.panels.values())

    def bundle(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What a cell holds: a still picture, with the live view unless that is closed; and the metadata."""
        if self.over:
            return self.still()
        shown = self.view._repr_mimebundle_()  # the first time it looks, so before the picture
        data, metadata = self.still()
        widget, more = shown if isinstance(shown, tuple) else (shown, {})  # `more` tells Colab which manager it needs
        data |= {key: value for key, value in (widget or {}).items() if "widget-view" in key}
        return data | {OUTLIVES: {}}, metadata | more

    def still(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The panels as HTML and text."""
        with self.source.lock:
            html = "\n".join(panel.html() for panel in self.panels.values())
        return {"text/html": self._said_html(html), "text/plain": repr(self)}, {}

    def keep_still(self) -> None:
        """Give the view the picture that its page shows when no kernel answers: after a restart, or when saved."""
        view = self.view  # made, it has looked
        with self.source.lock:
            html = "\n".join(panel.html() for name, panel in self.panels.items() if name in self._shown)
            text = "\n\n".join(panel.text() for name, panel in self.panels.items() if name in self._shown)
        self._kept_still = time.monotonic()
        view.still = whole(
            self._said_html(html if len(html) <= MOST_STILL else f"<pre>{escape(text[:MOST_STILL])}</pre>")
        )

    def _said_html(self, html: str) -> str:
        return self._language.html(html) if self._language else html

    def _said(self, panel: Panel | None, value: Any) -> Any:
        """What a panel shows or answers, in the language of the page that was opened last."""
        if self._language is None or panel is None:
            return value
        return spoken(value, (*panel.spoken, "problem"), self._language)

    def _heard(self, _: Any, message: dict[str, Any], __: Any) -> None:
        """A message of a page, on whichever thread the kernel chooses."""
        self._seen = time.monotonic()
        kind = message.get("kind")
        self._renewable = message.get("renewable", self._renewable)
        if "shown" in message:
            self._note_sight(str(message.get("page")), {name for name in message["shown"] if name in self.panels})
        if kind == "hello":
            self._language = language(str(message.get("language") or ""))
            self._want_history.set()
        elif kind == "here":
            self.view.answer()
        elif kind == "ask":
            panel = self.panels.get(str(message.get("panel")))
            if panel is not None and message.get("verb") in panel.slow:
                answer = partial(contextvars.copy_context().run, self._answer, message)
                threading.Thread(target=answer, name="mmlab view asks", daemon=True).start()
            else:
                self._answer(message)

    def _note_sight(self, page: str, shown: set[str]) -> None:
        """In sight is what any page of the last half minute shows: two browsers may look at different tabs."""
        pages = list(self._pages.items())
        fresh = {name: told for name, told in pages if self._seen - told[0] < SEEN_FOR}
        self._pages = fresh | {page: (self._seen, shown)}
        self._shown = set().union(*(names for _, names in self._pages.values()))

    def _answer(self, message: dict[str, Any]) -> None:
        """Have a panel carry out a request. Refusals go to the page, never into the comm channel."""
        panel, token = self.panels.get(str(message.get("panel"))), message.get("token")
        try:
            if panel is None:
                raise ValueError(f"no panel {message.get('panel')!r}")
            value = panel.handle(str(message.get("verb")), dict(message.get("args") or {}))
        except (MmlabError, ValueError, TypeError, KeyError, OSError) as error:
            self.view.refuse(token, self._language.say(str(error)) if self._language else str(error))
            return
        except Exception as error:  # a fault of ours: the page says so instead of waiting for ever
            self.view.refuse(token, f"{type(error).__name__}: {error}")
            return
        if isinstance(value, Reply):
            self.view.reply(token, self._said(panel, value.value), value.buffers)
        else:
            self.view.reply(token, self._said(panel, value))

    def _work(self) -> None:
        sent = 0.0
        while not self._end.wait(self._period if self.source.reading is None else BREATH):
            with self._lock:
                if self._end.is_set():
                    return
                try:
                    sent = self._turn(sent)
                except Exception as error:  # a fault, or a folder that is gone, must not freeze the view without a word
                    self._tell(error)

    def _turn(self, sent: float) -> float:
        """Look and send what is due; when was last sent."""
        self._look()  # often, also unseen: a saved notebook is to show the end, and may be saved right after it
        filled = self._filling and self.source.reading is None
        self._filling = self.source.reading is not None
        if filled:  # what pages have of a long log was merged in other places
            self._want_history.set()
            self._shown_state = self._end_shown()
        # told at once: the end, of which no more may follow
        changed = not self._filling and (filled or self.source.state != self._shown_state)
        if changed or time.monotonic() - sent >= self._pause():
            sent = time.monotonic()
            self._send()
        if filled:
            self._replace()
            self.keep_still()
        if not self._filling:
            self._renew()
        return sent

    def _end_shown(self) -> str:
        """The state that its cells show from the start: shown after the end, it stays live."""
        return self.source.state if self.source.ended else ""

    def _tell(self, error: Exception) -> None:
        """Say in all panels what went wrong, until a later turn goes well."""
        problem = {"problem": f"{type(error).__name__}: {error}"}
        self._frames = {name: (float("-inf"), frame | problem) for name, (_, frame) in self._frames.items()}
        self._want_history.set()  # what the failed turn had marked as sent may not have been
        with suppress(Exception):  # where nothing can be sent there is nobody to tell
            assert self._view is not None
            frames = {name: self._said(self.panels[name], frame) for name, (_, frame) in self._frames.items()}
            self._view.send_tick(frames, {})

    def _pause(self) -> float:
        unseen = time.monotonic() - self._seen >= SEEN_FOR
        return max(self._period, UNSEEN_PERIOD if unseen else FILLING_PERIOD if self._filling else 0.0)

    def _look(self) -> None:
        """Take in what is new."""
        self.source.look()

    def _look_at_all(self) -> None:
        """Take in what is new, however long that takes."""
        self._look()
        while self.source.reading is not None:
            self._look()

    def frames(self) -> dict[str, dict[str, Any]]:
        """What the panels in sight show now, each renewed at its own pace."""
        now = time.monotonic()
        with self.source.lock:
            for name, panel in self.panels.items():
                made, before = self._frames.get(name, (float("-inf"), {}))
                if name in self._shown and now - made >= panel.every:
                    self._frames[name] = (now, _frame(panel, before))
        return {name: frame for name, (_, frame) in self._frames.items()}

    def _send(self) -> None:
        """One message to all pages, at most: the history where one asked for it or the run went back."""
        assert self._view is not None
        frames = {name: self._said(self.panels[name], frame) for name, frame in self.frames().items()}
        share = self.source.reading
        if share is not None or self._filled:
            self._filled = True
            frames[WHOLE] = {"reading": None if share is None else int(100 * share)}
        points: dict[str, Any] = {}
        with self.source.lock:
            for panel in self.panels.values():
                new = panel.points()
                if new is None:
                    self._want_history.set()
                else:
                    points |= new
            if self._want_history.is_set() or self.source.cuts != self._cuts:
                self._want_history.clear()
                self._cuts = self.source.cuts
                curves: dict[str, Series] = {}
                for panel in self.panels.values():
                    curves |= panel.curves()
                self._view.send_history(frames, curves)
            else:
                self._view.send_tick(frames, points)

    def _renew(self) -> None:
        """Replace what the cells hold when the source pauses or ends, so that a saved notebook shows that."""
        state = self.source.state
        if state == self._shown_state:
            if time.monotonic() - self._kept_still > STILL_EVERY and not self.source.ended:
                self.keep_still()
                if self._renewable and state != "paused":
                    self._replace(only_new=True)
            return
        self._shown_state = state
        if self.source.ended and not self.lasting:
            self._finish()
        elif state == "paused" or self.source.ended:
            self._replace()
            self.keep_still()

    def _finish(self) -> None:
        self._end.set()
        self._replace()
        for panel in self.panels.values():
            panel.close()
        if self._view is not None:
            self._view.close()

    def _replace(self, only_new: bool = False) -> None:
        data, metadata = self.bundle()
        if only_new and data == self._published:
            return  # a notebook is saved after each change
        self._published = data
        for display_id in self._displays:
            # Outside the cell's context: nbclient takes updates only from the request that runs just now, and
            # JupyterLab finds the output by its display id whatever the request.
            contextvars.Context().run(publish, data, metadata, display_id, True)


def _frame(panel: Panel, before: dict[str, Any]) -> dict[str, Any]:
    """What a panel shows; one that fails says so, and the others go on."""
    try:
        frame = panel.frame()
    except Exception as error:
        return before | {"problem": f"{type(error).__name__}: {error}"}
    return frame | {"problem": ""} if "problem" in before else frame


def publish(data: dict[str, Any], metadata: dict[str, Any], display_id: str = "", update: bool = False) -> None:
    """Put a bundle into the current cell's output, or replace it wherever the display id stands."""
    from IPython.display import publish_display_data

    transient = {"display_id": display_id} if display_id else {}
    publish_display_data(whole(data), metadata, transient=transient, update=update)
