"""Fields of the plan as a form or a prompt shows them: unit, value as text, text as value."""

from __future__ import annotations

import re
import tomllib
from typing import Any, Literal

import tomli_w

from mmlab.errors import PlanError
from mmlab.plan.keys import Key
from mmlab.plan.section import Names

Entry = Literal["switch", "choice", "whole", "number", "text", "list"]
"""How a field is entered: yes or no, one of several, a whole number, a number, text, a list."""

_STATED = re.compile(r", in (pixels|elements|tokens|MB)\b")
_COUNTED = (
    "seconds", "minutes", "megabytes", "steps", "tokens", "samples", "pictures", "ranks", "replicas", "stages",
    "microbatches", "tiles", "engines", "blocks", "heads", "checkpoints", "walks", "processes", "chunks", "columns",
    "threads", "times", "share",
)  # fmt: skip
_SHORT = {"seconds": "s", "minutes": "min", "megabytes": "MB", "pixels": "px"}


def entry(key: Key) -> Entry:
    """How a field is entered."""
    if key.choices:
        return "choice"
    kinds: dict[Any, Entry] = {bool: "switch", int: "whole", float: "number", str: "text"}
    return kinds.get(key.kind, "list")


def unit(key: Key) -> str:
    """A number's unit in a word, as the field's docstring says it: "px", "s", "steps"; empty where it has none."""
    if entry(key) not in ("whole", "number") or "dimensionless" in key.doc:
        return ""
    if stated := _STATED.search(key.doc):
        return _SHORT.get(stated[1], stated[1])
    clause = re.split(r"[;.]", re.sub(r"^With \w+: ", "", key.doc))[0].lower()
    found = [(at.start(), word) for word in _COUNTED if (at := re.search(rf"\b{word}\b", clause))]
    word = min(found, default=(0, ""))[1]
    return _SHORT.get(word, word)


def shown(value: Any) -> str:
    """A value as text that `parse` reads back: 0.001, 1f1b, q_proj, v_proj."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, list | tuple):
        return str(value)
    items = [str(item) for item in value]
    plain = all(re.fullmatch(r"[^\s,\[\]\"']+", item) for item in items)
    return ", ".join(items) if plain else toml_value(value)


def parse(key: Key, text: str) -> Any:
    """The value that a text stands for; whether the field admits it is not asked. PlanError where it is none."""
    kind, trimmed = entry(key), text.strip()
    try:
        if kind == "whole":
            return int(trimmed)
        if kind == "number":
            return float(trimmed)
        if kind == "switch":
            return {"true": True, "false": False}[trimmed.lower()]
        return _items(key, trimmed) if kind == "list" else text
    except (ValueError, KeyError):
        raise PlanError(f"{trimmed!r} is not {key.expects}" if trimmed else f"give {key.expects}") from None


def _items(key: Key, text: str) -> list[Any]:
    """The items of a list: in TOML's brackets, or apart by commas (numbers also by spaces)."""
    if text.startswith("["):
        return list(tomllib.loads(f"value = {text}")["value"])
    if key.kind == Names or key.kind == tuple[str, ...]:
        return [part.strip(" \"'") for part in text.split(",") if part.strip(" \"'")]
    parts = text.replace(",", " ").split()
    return [float(part) if re.search(r"[.eE]", part) else int(part) for part in parts]


def toml_value(value: Any) -> str:
    """A value as TOML writes it, in one line."""
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    return tomli_w.dumps({"value": value}).partition("= ")[2].rstrip("\n")
