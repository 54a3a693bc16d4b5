"""Changes to a plan as people type them: several in one line, apart by commas, semicolons or spaces."""

from __future__ import annotations

import re
import tomllib

from mmlab.errors import PlanError

_VALUE = r"""(?:\[[^\]]*\]|"[^"]*"|'[^']*'|[^\s,;]+)"""
_FIRST = re.compile(rf"\s*[\w.]+\s*=\s*{_VALUE}")
_NEXT = re.compile(rf"[\s,;]+((?:\w+\.)+\w+|name)\s*=\s*{_VALUE}")
_PLAN = re.compile(r"""\s*("[^"]*"|'[^']*'|[^\s,;=]+)(?=[\s,;]|$)(?!\s*=)""")
_BETWEEN = " \t\r\n,;"


def changes_of(line: str) -> list[str]:
    """The changes of a line such as "parallel.tp=2, train.steps=80", one by one; a plan's path or preset may come
    first. A value with spaces goes in quotes. PlanError on a word that is none of these."""
    plan = _PLAN.match(line)
    rest = line[plan.end() :] if plan else line
    found = [plan[1].strip("\"'")] if plan else []
    changes, left = _split(rest.strip(_BETWEEN))
    if left:
        raise PlanError(f"{left.split()[0]!r} is no change to the plan; write key=value, such as parallel.tp=2")
    return found + changes


def separate(change: str) -> list[str]:
    """The changes that a text holds: one, whose value may be any TOML or a text without quotes, else several as in
    `changes_of`."""
    try:
        if tomllib.loads(f"value = {change.partition('=')[2].strip()}").keys() == {"value"}:
            return [change]  # else the next line is another change
    except tomllib.TOMLDecodeError:
        pass
    changes, left = _split(change.strip(_BETWEEN))
    return [change] if left or not changes else changes


def _split(text: str) -> tuple[list[str], str]:
    """Changes from the start of a text on, and what comes after the last."""
    match = _FIRST.match(text)
    found, at = [], 0
    while match:
        found.append(match[0].strip(_BETWEEN))
        at = match.end()
        match = _NEXT.match(text, at)
    return found, text[at:].strip(_BETWEEN)
