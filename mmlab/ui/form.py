"""A plan in a form: `form = plan.form()`, then `form.plan`.

The verbs are those of `mmlab.plan.draft.Draft`; the page asks for the same ones.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from mmlab.errors import LabError
from mmlab.plan import Fix, Plan, Problems
from mmlab.plan.draft import Draft
from mmlab.ui.panels.form import FormPanel
from mmlab.ui.part import PERIOD, Part

QUIET = 1.0
"""Seconds without a change after which what a saved notebook shows is made anew."""


class PlanSource:
    """A plan in the making, and the lab that may train it."""

    state = "editing"
    """Never another: what cells hold is not replaced while someone types."""
    ended = False
    cuts = 0
    reading = None

    def __init__(self, draft: Draft, lab: Any = None) -> None:
        self.draft, self.lab = draft, lab
        self.lock = threading.RLock()
        self.run: Any = None
        """The run that was started last."""

    def look(self) -> None:
        """Nothing to read: changes come by the verbs."""

    def train(self) -> Any:
        """Train the plan as it stands; the run. LabError without a lab, PlanError where a field holds what is no value
        or the plan has problems."""
        if self.lab is None:
            raise LabError("this form has no lab: plan.form(lab) trains, or lab.train(form.plan)")
        with self.lock:
            self.draft.raise_if_mistyped()
            plan = self.draft.plan
        run = self.lab.train(plan)
        self.run = run
        return run


class Form(Part):
    """A plan's fields in a page. `plan` is the plan as it stands, always a whole one: text that is no value of its
    field stays in the field, is said there, and does not change the plan; `check()` says what is wrong with it."""

    source: PlanSource

    def __init__(self, plan: Plan, lab: Any = None, period: float = PERIOD) -> None:
        source = PlanSource(Draft(plan), lab)
        super().__init__(source, [FormPanel(source)], "Form of a plan", period=period)
        self._drawn = (-1, 0.0)

    @property
    def plan(self) -> Plan:
        """The plan as it stands."""
        return self.source.draft.plan

    @property
    def run(self) -> Any:
        """The run that the form started last, if any."""
        return self.source.run

    def check(self) -> Problems:
        """What is wrong with the plan as it stands."""
        return self.plan.check()

    def set(self, key: str, value: Any) -> None:
        """Change a field: `form.set("parallel.tp", 2)`. PlanError where that cannot be."""
        with self.source.lock:
            self.source.draft.set(key, value)

    def fix(self, fix: Fix) -> None:
        """Apply a problem's fix: `form.fix(form.check()[0].fix)`."""
        with self.source.lock:
            self.source.draft.fix(fix)

    def repair(self) -> None:
        """Apply the fixes of all problems. PlanError where one has none that can be applied."""
        with self.source.lock:
            self.source.draft.repair()

    def start(self, preset: str) -> None:
        """Begin from a preset."""
        with self.source.lock:
            self.source.draft.start(preset)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Begin from a TOML file. PlanError where it is not a plan."""
        with self.source.lock:
            self.source.draft.load(path)

    def save(self, path: str | os.PathLike[str], overwrite: bool = False) -> Path:
        """Write the plan as TOML. PlanError where it cannot be, or a file is there and not `overwrite`."""
        with self.source.lock:
            return self.source.draft.save(path, overwrite)

    def undo(self) -> None:
        """Take the last change back."""
        with self.source.lock:
            self.source.draft.undo()

    def redo(self) -> None:
        """Make the change that was last undone again."""
        with self.source.lock:
            self.source.draft.redo()

    def train(self) -> Any:
        """Train the plan as it stands (`plan.form(lab)`); the run."""
        return self.source.train()

    def _look(self) -> None:
        super()._look()
        self._keep_still()

    def _keep_still(self) -> None:
        """Have a saved notebook show the plan as it stands: once nothing has changed for a while, not while typing."""
        revision, since = self._drawn
        if revision != self.source.draft.revision:
            self._drawn = (self.source.draft.revision, time.monotonic())
        elif since and time.monotonic() - since >= QUIET and self._view is not None:
            self._drawn = (revision, 0.0)
            self._view.still = self.panels["form"].html()
