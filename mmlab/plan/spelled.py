"""The same plan said four ways: the TOML that differs, all of it, the Python and the command line."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import tomli_w

from mmlab.plan.entry import toml_value
from mmlab.plan.io import Diff, parse_override, read
from mmlab.plan.plan import Plan
from mmlab.plan.presets import preset_names
from mmlab.plan.typed import separate


@dataclass(frozen=True)
class Base:
    """What a plan is said against: a preset or a file, and the plan that it holds (or held when it was read)."""

    kind: Literal["preset", "file"]
    name: str
    plan: Plan

    @classmethod
    def preset(cls, name: str) -> Base:
        """A preset. PlanError on an unknown name."""
        return cls("preset", name, Plan.preset(name))

    @classmethod
    def file(cls, path: str) -> Base:
        """A TOML file. PlanError where it is not a plan."""
        found = Path(path).expanduser() if path.startswith("~") else Path(path)
        return cls("file", str(found), read(Plan, found))

    @property
    def python(self) -> str:
        """The call that makes it."""
        return f"mmlab.Plan.{'preset' if self.kind == 'preset' else 'load'}({_quoted(self.name)})"


@cache
def _presets() -> tuple[Base, ...]:
    return tuple(Base.preset(name) for name in preset_names())


def nearest_preset(plan: Plan) -> Base:
    """The preset from which a plan differs in the fewest fields."""
    return min(_presets(), key=lambda base: len(base.plan.diff(plan)))


def override(key: str, value: Any) -> str:
    """`key=value` that `Plan.with_` and the command line read back; text goes without quotes where it can."""
    bare = f"{key}={value}"
    if isinstance(value, str) and value and separate(bare) == [bare] and parse_override(bare) == (key, value):
        return bare
    return f"{key}={toml_value(value)}"


def overrides(base: Plan, plan: Plan) -> list[str]:
    """The `key=value` changes that turn one plan into another, in the order of the schema."""
    return [override(change.key, change.after) for change in base.diff(plan)]


def differing_toml(plan: Plan, base: Plan | None = None) -> str:
    """The fields that differ from the defaults (or from `base`), as TOML; against the defaults it is a whole plan."""
    tables: dict[str, Any] = {}
    changes: Diff = (base or Plan()).diff(plan)
    for change in changes:
        *path, leaf = change.key.split(".")
        table = tables
        for part in path:
            table = table.setdefault(part, {})
        table[leaf] = change.after
    return tomli_w.dumps(_plain_first(tables))


def _plain_first(tables: Mapping[str, Any]) -> dict[str, Any]:
    """The same with a table's own fields before the tables in it, as TOML needs them."""
    plain = {key: value for key, value in tables.items() if not isinstance(value, dict)}
    return plain | {key: _plain_first(value) for key, value in tables.items() if isinstance(value, dict)}


@dataclass(frozen=True)
class Spelled:
    """A plan said against a base. `toml` and `whole` are files, `python` and `command` lines; each gives the plan."""

    plan: Plan
    base: Base

    @property
    def changes(self) -> Diff:
        """The fields that differ from the base."""
        return self.base.plan.diff(self.plan)

    @property
    def toml(self) -> str:
        """A plan file with what differs from the defaults."""
        return differing_toml(self.plan) or f"name = {toml_value(self.plan.name)}\n"

    @property
    def whole(self) -> str:
        """A plan file with every field."""
        return self.plan.dumps()

    @property
    def python(self) -> str:
        """A Python expression, after `import mmlab`."""
        changes = [_quoted(change) for change in overrides(self.base.plan, self.plan)]
        if not changes:
            return self.base.python
        line = f"{self.base.python}.with_({', '.join(changes)})"
        if len(line) <= 88:
            return line
        return f"{self.base.python}.with_(\n" + "".join(f"    {change},\n" for change in changes) + ")"

    @property
    def command(self) -> str:
        """A line for a shell."""
        words = [self.base.name, *overrides(self.base.plan, self.plan)]
        return " ".join(["mmlab run", *map(shlex.quote, words)])


def _quoted(text: str) -> str:
    """Text as a Python literal, in double quotes where it holds none."""
    literal = repr(text)
    return literal if '"' in text or "\\" in literal or "'" in text else f'"{literal[1:-1]}"'
