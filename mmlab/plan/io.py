"""Plans in and out: TOML, overrides such as `parallel.tp=2`, differences, changes during a run."""

from __future__ import annotations

import os
import textwrap
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import tomli_w
from pydantic import ValidationError

from mmlab.errors import PlanError
from mmlab.plan import schema
from mmlab.plan.keys import flatten, get, known_key, known_keys, live_keys, sections, unknown_key
from mmlab.plan.tables import html_table, text_table
from mmlab.plan.typed import separate

P = TypeVar("P", bound=schema.Plan)


def _shown(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_shown(item) for item in value) + "]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def _unknown(data: Mapping[str, Any]) -> list[str]:
    """One line for each key that the plan does not have."""
    lines = []
    for name, value in flatten(data):
        empty_section = name in sections() and value == {}
        if name in known_keys() or empty_section:
            continue
        if name in sections():
            lines.append(
                f"{name} = {_shown(value)}: {name} is a section of the plan, write [{name}] and its keys below"
            )
        else:
            lines.append(unknown_key(name))
    return lines


def _wrong(error: ValidationError) -> list[str]:
    """One line for each field with a wrong type or value."""
    lines = []
    for item in error.errors(include_url=False):
        name = ".".join(part for part in item["loc"] if isinstance(part, str))  # numbers count within a list
        key = known_keys().get(name)
        expects = f"{key.expects} ({key.doc})" if key else "a table"
        lines.append(f"{name} = {_shown(item['input'])}: must be {expects}")
    return lines


def build(cls: type[P], data: Mapping[str, Any], source: str) -> P:
    """A plan from nested tables. PlanError with one line for each field at fault, naming `source`."""
    lines = _unknown(data)
    if not lines:
        try:
            return cls.model_validate(data, strict=True)
        except ValidationError as error:
            lines = _wrong(error)
    raise PlanError("\n  ".join([f"{source} is not a plan:", *lines]) if len(lines) > 1 else f"{source}: {lines[0]}")


def loads(cls: type[P], text: str, source: str = "plan") -> P:
    """A plan from TOML. PlanError where it is not TOML or not a plan."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise PlanError(f"{source} is not TOML: {error}") from None
    return build(cls, data, source)


def dumps(plan: schema.Plan, comments: bool = False) -> str:
    """TOML with every field; with `comments`, each field's docstring above it."""
    text = tomli_w.dumps(plan.model_dump())
    return _commented(text) if comments else text


def _commented(text: str) -> str:
    lines: list[str] = []
    section = ""
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[]") + "."
        name = section + line.partition(" =")[0]
        if name in known_keys():
            key = known_keys()[name]
            choices = f" ({key.expects})" if key.choices else ""
            live = " May change during a run." if key.live else ""
            lines += textwrap.wrap(f"{key.doc}{choices}{live}", 110, initial_indent="# ", subsequent_indent="#   ")
        lines.append(line)
    return "\n".join(lines) + "\n"


def save(plan: schema.Plan, path: str | os.PathLike[str], comments: bool = False) -> Path:
    """Write a plan as TOML, whole or not at all. PlanError where the file cannot be written."""
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(dumps(plan, comments), encoding="utf-8")
        os.replace(temporary, target)
    except OSError as error:
        raise PlanError(f"cannot write {target}: {error.strerror or error}") from None
    finally:
        if temporary.exists():
            temporary.unlink()
    return target


def read(cls: type[P], path: Path) -> P:
    """A plan from a TOML file. PlanError where it cannot be read or is not a plan."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise PlanError(f"{path} is not TOML: it is not UTF-8 text") from None
    except OSError as error:
        raise PlanError(f"cannot read {path}: {error.strerror or error}") from None
    return loads(cls, text, str(path))


def parse_override(text: str) -> tuple[str, Any]:
    """`key=value` as (dotted key, value). The value is TOML; text may go without quotes. PlanError without "="."""
    name, equals, raw = text.partition("=")
    name, raw = name.strip(), raw.strip()
    if not equals or not name:
        raise PlanError(f"{text!r} is not an override; write key=value, for example parallel.tp=2")
    try:
        value = tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        value = {"True": True, "False": False}.get(raw, raw)
    key = known_keys().get(name)
    if key is not None and key.kind is str and not isinstance(value, str):
        value = raw
    return name, value


def with_changes(plan: P, changes: Iterable[str | Mapping[str, Any]]) -> P:
    """A copy of the plan with overrides applied in order: `key=value` texts, each of one or several, or (nested or
    dotted) mappings."""
    data = plan.model_dump()
    for change in changes:
        if not isinstance(change, str | Mapping):
            raise PlanError(f'a change to a plan is "parallel.tp=2" or {{"parallel.tp": 2}}, not {change!r}')
        items = list(map(parse_override, separate(change))) if isinstance(change, str) else list(change.items())
        for name, value in flatten(dict(items)):
            *path, leaf = name.split(".")
            table = data
            for part in path:
                if not isinstance(table.get(part), dict):
                    table[part] = {}
                table = table[part]
            if not (name in sections() and value == {}):
                table[leaf] = value
    return build(type(plan), data, "override")


def set_live(plan: P, values: Mapping[str, Any]) -> P:
    """A copy of the plan with live fields changed. PlanError on keys that a run cannot change."""
    for name, _ in flatten(values):
        if not known_key(name).live:
            raise PlanError(f"{name} cannot change during a run; these can: {', '.join(live_keys())}")
    return with_changes(plan, [values])


@dataclass(frozen=True)
class Change:
    """One field that differs between two plans."""

    key: str
    before: Any
    after: Any


class Diff(list[Change]):
    """The fields in which two plans differ; a table in text and HTML."""

    def _rows(self) -> list[list[str]]:
        return [[change.key, _shown(change.before), _shown(change.after)] for change in self]

    def __str__(self) -> str:
        return text_table(["field", "before", "after"], self._rows()) if self else "no difference"

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return html_table(["field", "before", "after"], self._rows()) if self else "<p>no difference</p>"


def diff(before: schema.Plan, after: schema.Plan) -> Diff:
    """What differs from one plan to another, field by field."""
    pairs = ((name, get(before, name), get(after, name)) for name in known_keys())
    return Diff(Change(name, old, new) for name, old, new in pairs if old != new)
