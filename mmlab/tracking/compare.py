"""The difference of two checkpoints as a table."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

from mmlab.plan.io import Diff
from mmlab.plan.tables import html_table, text_table
from mmlab.tracking.tables import Table

SHOWN = 10
"""Names that are listed of those that cannot be compared."""


@dataclass(repr=False)
class Comparison(Table):
    """What differs between two checkpoints.

    `first` and `second` are their rows; `plan` the fields that differ; `modules` [{"module", "change" (||second -
    first|| / ||first||, null where it is not finite), "norm" (||first||), "parameters" (compared), "tensors",
    "changed", "same" (whether a frozen part has the same content in both, which is then not read)}]; `tensors` those
    that changed most [{"name", "module", "change", "difference" (||second - first||), "shape"}]; `only` [names in the
    first alone, in the second alone]; `reshaped` names whose shapes differ.
    """

    first: dict[str, Any]
    second: dict[str, Any]
    plan: Diff
    modules: list[dict[str, Any]]
    tensors: list[dict[str, Any]]
    only: list[list[str]]
    reshaped: list[str]

    header = ("module", "change of weights", "tensors changed", "parameters compared", "")
    nothing = "no weights that both have"

    @property
    def cells(self) -> list[tuple[str, ...]]:
        """One row a module."""
        return [
            (
                m["module"], relative(m), f"{m['changed']} of {m['tensors']}" if m["tensors"] else "-",
                f"{m['parameters']:,}" if m["tensors"] else "-", "frozen part the same" if m["same"] else "",
            )
            for m in self.modules
        ]  # fmt: skip

    @property
    def title(self) -> str:
        """Which two, in one line."""
        names = [f"{row['name']} (step {row['step']}, {row['layout']})" for row in (self.first, self.second)]
        if self.first["run"] != self.second["run"]:
            names = [f"{name} of run {row['run']}" for name, row in zip(names, (self.first, self.second), strict=True)]
        return f"{names[0]} -> {names[1]}"

    @property
    def rest(self) -> list[str]:
        """What cannot be compared, one sentence each."""
        lines = [
            f"only in {row['name']}: {_some(names)}"
            for row, names in zip((self.first, self.second), self.only, strict=True)
            if names
        ]
        return lines + ([f"of another shape: {_some(self.reshaped)}"] if self.reshaped else [])

    def _tensors(self) -> list[tuple[str, ...]]:
        return [(t["name"], relative(t), "x".join(map(str, t["shape"]))) for t in self.tensors]

    def __str__(self) -> str:
        parts = [self.title, super().__str__()]
        if self.tensors:
            parts.append(text_table(("changed most", "change", "shape"), self._tensors()))
        return "\n\n".join([*parts, *self.rest, f"plan: {self.plan}" if not self.plan else f"plan:\n{self.plan}"])

    def html(self) -> str:
        """The tables as HTML."""
        parts = [f"<p><b>{escape(self.title)}</b></p>", super().html()]
        if self.tensors:
            parts.append(html_table(("changed most", "change", "shape"), self._tensors()))
        return "".join([*parts, *(f"<p>{escape(line)}</p>" for line in self.rest), self.plan._repr_html_()])

    def to_json(self) -> dict[str, Any]:
        """All of it as JSON values; the plan as [[field, before, after]]."""
        rows = [[str(cell) for cell in row] for row in self.plan._rows()]
        return {
            "first": self.first, "second": self.second, "title": self.title, "plan": rows, "modules": self.modules,
            "tensors": self.tensors, "only": self.only, "reshaped": self.reshaped, "rest": self.rest,
        }  # fmt: skip


def relative(entry: dict[str, Any]) -> str:
    """A relative change in words."""
    if not entry.get("tensors", 1) or entry["change"] == 0:
        return "unchanged"
    return "not finite" if entry["change"] is None else f"{entry['change']:.3g}"


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
