"""What is wrong with a plan, and how to put it right: problems with fixes that can be applied."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mmlab.errors import PlanError
from mmlab.plan.tables import html_table, text_table

if TYPE_CHECKING:
    from mmlab.plan.plan import Plan

_HEADERS = ("field", "problem", "fix")


@dataclass(frozen=True)
class Fix:
    """What to do about a problem: a sentence, and the overrides that do it (none where only a person can)."""

    sentence: str
    overrides: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[str]:
        """The overrides, so that `plan.with_(*problem.fix)` applies them."""
        return iter(self.overrides)

    def __str__(self) -> str:
        return self.sentence + (f": {' '.join(self.overrides)}" if self.overrides else "")


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a plan: the dotted field at fault, what is wrong, what to do."""

    field: str
    message: str
    fix: Fix

    def __str__(self) -> str:
        return f"{self.field}: {self.message} Fix: {self.fix}."


class Problems(list[Problem]):
    """The problems of a plan, none if it can run; a table in text, in rich and in a notebook."""

    def __init__(self, plan: Plan, problems: Iterable[Problem] = (), engines: int | None = None) -> None:
        super().__init__(problems)
        self.plan, self.engines = plan, engines

    def apply(self) -> Plan:
        """The plan with all fixes applied, those that the fixes call for included. PlanError if a problem has none."""
        problems, seen = self, {self.plan}
        while problems:
            overrides = next((p.fix.overrides for p in problems if p.fix.overrides), ())
            plan = problems.plan.with_(*overrides)
            if plan in seen:
                problems.raise_if_any()
            seen.add(plan)
            problems = plan.check(engines=self.engines)
        return problems.plan

    def raise_if_any(self) -> None:
        """PlanError naming every problem with its field and fix."""
        if not self:
            return
        lines = [str(problem) for problem in self]
        count = f"{len(lines)} problems:\n  " if len(lines) > 1 else ""
        raise PlanError(f"plan {self.plan.name}: {count}" + "\n  ".join(lines))

    def _rows(self) -> list[list[str]]:
        return [[problem.field, problem.message, str(problem.fix)] for problem in self]

    def __str__(self) -> str:
        return text_table(_HEADERS, self._rows()) if self else "no problems"

    def __repr__(self) -> str:
        return str(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return Problems, (self.plan, list(self), self.engines)

    def __rich__(self) -> Any:
        from rich.table import Column, Table

        if not self:
            return str(self)
        # Folded, never cut: a reader (and a script) must find the whole name of a field.
        columns = [Column(name, no_wrap=name == "field", overflow="fold") for name in _HEADERS]
        table = Table(*columns, show_lines=True)
        for row in self._rows():
            table.add_row(*(cell.replace("[", r"\[") for cell in row))
        return table

    def _repr_html_(self) -> str:
        return html_table(_HEADERS, self._rows()) if self else "<p>no problems</p>"
