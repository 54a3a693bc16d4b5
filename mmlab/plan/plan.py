"""`Plan` as people use it: the schema's fields with loading, overrides, checks, layout and schedule."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any, Self

from mmlab.errors import PlanError
from mmlab.plan import io, presets, rules, schema
from mmlab.plan.layout import Layout
from mmlab.plan.memory import Memory
from mmlab.plan.problems import Fix, Problems
from mmlab.plan.schedule import Schedule, build_schedule


class Plan(schema.Plan):
    """One run: model, layout, data, training. Immutable: every change makes a new plan."""

    @classmethod
    def load(cls, source: str | os.PathLike[str]) -> Self:
        """A plan from a TOML file or, where there is no such file, the preset of that name. PlanError otherwise."""
        path = Path(source)
        if path.is_file():
            return io.read(cls, path)
        name = os.fspath(source)
        if name in presets.preset_names():
            return cls.preset(name)
        reason = f"{name} is a folder, not a plan file" if path.is_dir() else f"no plan file {name}"
        raise PlanError(f"{reason}, and no preset of that name; presets: {', '.join(presets.preset_names())}")

    @classmethod
    def named(cls, given: Any) -> Plan | None:
        """The plan that is given whole, itself, by its path or as a preset; None for a change to one, such as
        "parallel.tp=2". PlanError as from `load`."""
        if isinstance(given, Plan):
            return given
        return cls.load(given) if isinstance(given, Path) or (isinstance(given, str) and "=" not in given) else None

    @classmethod
    def preset(cls, name: str) -> Self:
        """A plan that comes with mmlab. PlanError lists the names where there is none like it."""
        if name not in presets.preset_names():
            raise PlanError(f"no preset {name!r}; presets: {', '.join(presets.preset_names())}")
        return cls.loads(presets.preset_text(name), f"preset {name}")

    @classmethod
    def loads(cls, text: str, source: str = "plan") -> Self:
        """A plan from TOML text; `source` names it in messages. PlanError on what is not a plan."""
        return io.loads(cls, text, source)

    def dumps(self, comments: bool = False) -> str:
        """The plan as TOML; with `comments`, each field's docstring above it."""
        return io.dumps(self, comments)

    def save(self, path: str | os.PathLike[str], comments: bool = False) -> Path:
        """Write the plan as TOML, whole or not at all. PlanError where that fails."""
        return io.save(self, path, comments)

    def with_(self, *changes: str | Mapping[str, Any] | Fix) -> Self:
        """A copy with changes: "parallel.tp=2", "parallel.tp=2, train.steps=80", {"parallel.tp": 2} or a problem's fix.
        PlanError on bad ones."""
        flat = (part for change in changes for part in (change.overrides if isinstance(change, Fix) else (change,)))
        return io.with_changes(self, flat)

    def diff(self, other: schema.Plan) -> io.Diff:
        """The fields that another plan has otherwise."""
        return io.diff(self, other)

    def check(self, engines: int | None = None) -> Problems:
        """What is wrong with the plan, each problem with field, message and fix; with `engines`, whether that many are
        enough. `plan.check().apply()` gives the repaired plan."""
        return Problems(self, rules.find_problems(self, engines), engines)

    def layout(self) -> Layout:
        """Which rank is what, on which node; shows as a table and a picture."""
        return Layout(self)

    def schedule(self) -> Schedule:
        """What each rank does in a step, in order; shows as a picture."""
        return build_schedule(self)

    def memory(self) -> Memory:
        """What each rank holds of weights, gradients and optimizer state, and what is not counted; shows as a table."""
        return Memory(self)

    def form(self, lab: Any = None) -> Any:
        """A form that starts from this plan (`mmlab.ui.form.Form`); its `plan` is what it stands at. With a lab it can
        train it. Views lie above: this one is loaded by name."""
        return importlib.import_module("mmlab.ui.form").Form(self, lab)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """In a cell: what differs from the defaults, as a table."""
        changes = io.diff(type(self)(), self)
        line = f"{self.name}: {self.world_size} ranks; what differs from the defaults (plan.dumps() has every field):"
        html = f"<p>{escape(line)}</p>{changes._repr_html_()}"
        return {"text/plain": f"{line}\n\n{changes}", "text/html": html}
