"""A plan while someone makes it: changes one by one, back and forth, with what was typed and is no value."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mmlab.errors import PlanError
from mmlab.plan.entry import entry, parse, shown
from mmlab.plan.io import Diff
from mmlab.plan.keys import get, known_key
from mmlab.plan.plan import Plan
from mmlab.plan.problems import Fix, Problem, Problems
from mmlab.plan.spelled import Base, Spelled, nearest_preset

MOST_CHECKED = 10_000
"""Ranks up to which a plan is checked at each change: 0.3 s there (measured: 1,000 ranks 28 ms, 20,000 0.84 s)."""
MOST_UNDONE = 200
"""Changes that can be undone."""


@dataclass(frozen=True)
class Mistyped:
    """What was typed into a field and is no value of it, and why."""

    text: str
    reason: str


@dataclass(frozen=True)
class _State:
    """All that undoing brings back."""

    plan: Plan
    base: Base
    mistyped: dict[str, Mistyped] = field(default_factory=dict, hash=False)
    label: str = ""
    """What change led here."""
    edit: str = ""
    """Names the change while it goes on: what is typed into one field is undone at once."""


class Draft:
    """A plan in the making. `plan` is always a whole plan: what was typed wrongly does not change it."""

    def __init__(self, plan: Plan, base: Base | None = None) -> None:
        self._state = _State(plan, base or nearest_preset(plan))
        self._before: list[_State] = []
        self._after: list[_State] = []
        self.revision = 0
        """Counts up with every change."""

    @property
    def plan(self) -> Plan:
        """The plan as it stands."""
        return self._state.plan

    @property
    def base(self) -> Base:
        """What it was started from: the preset or the file last taken, or the preset nearest to it."""
        return self._state.base

    @property
    def mistyped(self) -> dict[str, Mistyped]:
        """What stands in fields without being a value of theirs, by dotted key."""
        return self._state.mistyped

    @property
    def spelled(self) -> Spelled:
        """The same plan as TOML, Python and command line."""
        return Spelled(self.plan, self.base)

    @property
    def undoes(self) -> str:
        """The change that `undo` takes back, in words; empty where there is none."""
        return self._state.label if self._before else ""

    @property
    def redoes(self) -> str:
        """The change that `redo` makes again."""
        return self._after[-1].label if self._after else ""

    @property
    def checkable(self) -> bool:
        """Whether the plan is small enough to be checked at each change."""
        return self.plan.world_size <= MOST_CHECKED

    def problems(self) -> Problems:
        """What is wrong with the plan; beyond MOST_CHECKED ranks only that it was not checked."""
        if self.checkable:
            return self.plan.check()
        message = f"{self.plan.world_size:,} ranks: more than {MOST_CHECKED:,} are not checked as you type."
        return Problems(self.plan, [Problem("parallel", message, Fix("take fewer, or ask plan.check() yourself"))])

    def text(self, key: str) -> str:
        """What stands in a field: the text that is no value, else the value."""
        wrong = self.mistyped.get(key)
        return wrong.text if wrong else shown(get(self.plan, key))

    def set(self, key: str, value: Any, edit: str = "") -> None:
        """Change a field. PlanError on an unknown key or a value that it does not admit; the plan then stays.

        Changes of one field with the same `edit` that follow each other are undone as one.
        """
        plan = self.plan.with_({key: value})
        self._take(self._named(key, plan, edit), edit and f"{key} {edit}")

    def enter(self, key: str, text: str, edit: str = "") -> bool:
        """Take what was typed into a field, as a value where it is one, else as `mistyped`. Whether it was one.

        PlanError on an unknown key.
        """
        known = known_key(key)
        try:
            value = parse(known, text) if entry(known) != "choice" else text
            plan = self.plan.with_({key: value})
        except PlanError as error:
            own = str(error).startswith(("override", "plan"))
            reason = f"{text.strip()!r} is not {known.expects}" if own else str(error)
            state = replace(self._state, mistyped={**self.mistyped, key: Mistyped(text, reason)})
            self._take(replace(state, label=f"{key}: {text!r}"), f"{key} {edit}" if edit else "")
            return False
        self._take(self._named(key, plan, edit), f"{key} {edit}" if edit else "")
        return True

    def _named(self, key: str, plan: Plan, edit: str) -> _State:
        first = self._before[-1].plan if edit and self._before and self._state.edit == f"{key} {edit}" else self.plan
        label = f"{key}: {shown(get(first, key))} → {shown(get(plan, key))}"
        rest = {name: wrong for name, wrong in self.mistyped.items() if name != key}
        return replace(self._state, plan=plan, mistyped=rest, label=label)

    def reset(self, key: str) -> None:
        """A field as the base has it. PlanError on an unknown key."""
        known_key(key)
        self.set(key, get(self.base.plan, key))

    def fix(self, fix: Fix | Iterable[str]) -> None:
        """Change what a problem's fix changes. PlanError where that is no change."""
        changes = list(fix)
        if not changes:
            raise PlanError("this has no fix that a machine could apply")
        self._replace(self.plan.with_(*changes), "fix " + " ".join(changes))

    def repaired(self) -> Diff:
        """What `repair` would change. PlanError where a problem has no fix that can be applied."""
        return self.plan.diff(self.problems().apply())

    def repair(self) -> None:
        """Apply the fixes of all problems, those that the fixes call for included. PlanError as `repaired`."""
        self._replace(self.problems().apply(), "fix all problems")

    def _replace(self, plan: Plan, label: str) -> None:
        changed = {change.key for change in self.plan.diff(plan)}
        rest = {name: wrong for name, wrong in self.mistyped.items() if name not in changed}
        self._take(replace(self._state, plan=plan, mistyped=rest, label=label))

    def start(self, preset: str) -> None:
        """Begin from a preset: all fields become its. PlanError on an unknown one."""
        base = Base.preset(preset)
        self._take(_State(base.plan, base, label=f"start from {preset}"))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Begin from a TOML file. PlanError, in one sentence, where it is not a plan."""
        base = Base.file(_named_path(path))
        self._take(_State(base.plan, base, label=f"load {base.name}"))

    def save(self, path: str | os.PathLike[str], overwrite: bool = False) -> Path:
        """Write the plan as TOML, whole; the file becomes the base. PlanError where it cannot be written, where there
        is a file of that name and not `overwrite`, and where a field holds what is no value."""
        self.raise_if_mistyped()
        name = _named_path(path)
        target = Path(name).expanduser()
        if target.exists() and not overwrite:
            raise PlanError(f"{name} is there already: replace it (overwrite=True) or give another name")
        saved = self.plan.save(target)
        self._take(replace(self._state, base=Base.file(name), label=f"save {name}"))
        return saved

    def raise_if_mistyped(self) -> None:
        """PlanError that names the fields whose text is no value."""
        if self.mistyped:
            said = "; ".join(f"{key}: {wrong.reason}" for key, wrong in self.mistyped.items())
            raise PlanError(f"what was typed is not what the plan holds: {said}")

    def undo(self) -> None:
        """Take the last change back. PlanError where there is none."""
        if not self._before:
            raise PlanError("there is nothing to undo")
        self._after.append(self._state)
        self._go(self._before.pop())

    def redo(self) -> None:
        """Make the change that was last undone again. PlanError where there is none."""
        if not self._after:
            raise PlanError("there is nothing to do again")
        self._before.append(self._state)
        self._go(self._after.pop())

    def _take(self, state: _State, edit: str = "") -> None:
        same = (state.plan, state.base, state.mistyped) == (self.plan, self.base, self.mistyped)
        if same:
            return
        if not (edit and edit == self._state.edit and self._before):
            self._before = [*self._before, self._state][-MOST_UNDONE:]
        self._after = []
        self._go(replace(state, edit=edit))

    def _go(self, state: _State) -> None:
        self._state = state
        self.revision += 1


def _named_path(path: str | os.PathLike[str]) -> str:
    name = os.fspath(path).strip()
    if not name:
        raise PlanError("give the path of a TOML file, such as plan.toml")
    return name
