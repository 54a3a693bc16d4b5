"""Tables of what a run counted: the same cells as text and as HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from mmlab.plan.tables import html_table, size_text, text_table

WINDOW = 20
"""Last steps over which tables take means."""


class Table:
    """Rows of cells under a header; shows as a table in a terminal and in a notebook."""

    header: tuple[str, ...]
    nothing: str
    """What to say where there are no rows."""

    @property
    def cells(self) -> Sequence[tuple[str, ...]]:
        """The rows as shown."""
        raise NotImplementedError

    @property
    def below(self) -> str:
        """A line below the table; empty without one."""
        return ""

    def __str__(self) -> str:
        table = text_table(self.header, self.cells) if self.cells else self.nothing
        return f"{table}\n{self.below}" if self.below else table

    def __repr__(self) -> str:
        return str(self)

    def html(self) -> str:
        """The table as HTML; a sentence where there are no rows."""
        table = html_table(self.header, self.cells) if self.cells else f"<p>{escape(self.nothing)}</p>"
        return f"{table}<p>{escape(self.below)}</p>" if self.below else table

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/plain": str(self), "text/html": self.html()}


def size(count: float | None) -> str:
    """Bytes in three digits; empty for none."""
    return "" if count is None else size_text(count)


def milliseconds(seconds: float | None) -> str:
    """A time; empty for none."""
    return "" if seconds is None else f"{seconds * 1000:.2f} ms"


def mean(values: Iterable[float]) -> float:
    """The mean; 0 of none."""
    found = list(values)
    return sum(found) / len(found) if found else 0.0
