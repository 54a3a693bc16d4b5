"""Dotted keys of the plan: what exists, what each may hold, and which is meant by a misspelled one."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt

from mmlab.errors import PlanError
from mmlab.plan.schema import LIVE, Plan, Section
from mmlab.plan.section import Ranks

_KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    tuple[str, ...]: "a list of names",
}
_COUNTS = "a list of whole numbers, each at least 1"
_BOUNDS = ((Ge, "ge", "at least"), (Gt, "gt", "above"), (Le, "le", "at most"), (Lt, "lt", "below"))


@dataclass(frozen=True)
class Key:
    """One leaf field of the plan: its dotted name, type, default, docstring and whether `run.set` may change it."""

    name: str
    kind: Any
    default: Any
    doc: str
    bounds: str
    live: bool

    @property
    def choices(self) -> tuple[Any, ...]:
        """The values a choice admits; empty for numbers and text."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def expects(self) -> str:
        """What the field may hold, as a noun phrase: "a whole number, at least 1"."""
        if self.choices:
            return "one of " + ", ".join(str(choice) for choice in self.choices)
        if self.kind not in _KINDS:
            (item, *_) = get_args(self.kind)
            if self.kind == get_args(Ranks)[0]:
                return "a list of ranks, whole numbers from 0 on"
            return "a list of positive numbers" if float in get_args(item) else _COUNTS
        return _KINDS[self.kind] + self.bounds


def _walk(section: type[Section], prefix: str) -> Iterator[Key]:
    defaults = section()
    for name, info in section.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            yield from _walk(kind, f"{prefix}{name}.")
            continue
        bounds = "".join(
            f", {word} {getattr(bound, attribute)}"
            for bound in info.metadata
            for form, attribute, word in _BOUNDS
            if isinstance(bound, form)
        )
        doc = " ".join((info.description or "").split())
        yield Key(prefix + name, kind, getattr(defaults, name), doc, bounds, info.json_schema_extra == LIVE)


@cache
def known_keys() -> Mapping[str, Key]:
    """All leaf fields by dotted name, in the order of the schema."""
    return types.MappingProxyType({key.name: key for key in _walk(Plan, "")})


@cache
def sections() -> Mapping[str, str]:
    """Docstrings of all sections by dotted name ("model", "model.vision", ...)."""
    found: dict[str, str] = {}

    def visit(section: type[Section], prefix: str) -> None:
        for name, info in section.model_fields.items():
            if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
                found[prefix + name] = " ".join((info.description or "").split())
                visit(info.annotation, f"{prefix}{name}.")

    visit(Plan, "")
    return types.MappingProxyType(found)


def live_keys() -> list[str]:
    """Dotted keys that `run.set` may change while a run goes on."""
    return [key.name for key in known_keys().values() if key.live]


def nearest(name: str) -> str:
    """The known dotted key that is most like `name`: the same last part under another section first."""
    leaf = name.rpartition(".")[2]
    same_leaf = [known for known in known_keys() if known.rpartition(".")[2] == leaf]
    candidates = same_leaf or list(known_keys())

    def likeness(known: str) -> float:
        whole = difflib.SequenceMatcher(None, name, known).ratio()
        return whole + difflib.SequenceMatcher(None, leaf, known.rpartition(".")[2]).ratio()

    return max(candidates, key=likeness)


def known_key(name: str) -> Key:
    """The field of a dotted key. PlanError, with the nearest known key, where there is none."""
    if name not in known_keys():
        raise PlanError(unknown_key(name))
    return known_keys()[name]


def unknown_key(name: str) -> str:
    """That a dotted key is none, with the nearest known one."""
    return f"unknown key {name}; the nearest known one is {nearest(name)}"


def get(plan: Section, name: str) -> Any:
    """The value of a dotted key. AttributeError where there is none."""
    value: Any = plan
    for part in name.split("."):
        value = getattr(value, part)
    return value


def flatten(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested tables as (dotted key, value); an empty table is a leaf."""
    for name, value in data.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
