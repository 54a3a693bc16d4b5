"""Tables as plain text and as HTML that reads on light and dark backgrounds."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

FONT = "system-ui,-apple-system,Segoe UI,Helvetica,Arial,sans-serif"
INK, FAINT, GRID = "#1a202c", "#5a6577", "#e2e8f0"
"""Font and colours of all pictures: dark text, secondary text, rules."""

_STYLE = "border-collapse:collapse;background:#fff;color:#1a202c;font:13px/1.45 system-ui,sans-serif"
_ROW = "background:none"
"""JupyterLab stripes rows in the theme's colours, on which this ink cannot be read in a dark one."""
_CELL = "text-align:left;padding:3px 12px;border-bottom:1px solid #e2e8f0;vertical-align:top"


def text_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns aligned by spaces under a ruled header; cells with several lines stay in their column."""
    cells = [list(headers), *(list(row) for row in rows)]
    widths = [max(len(line) for row in cells for line in row[i].split("\n")) for i in range(len(headers))]

    def lines(row: Sequence[str]) -> list[str]:
        columns = [cell.split("\n") for cell in row]
        height = max(len(column) for column in columns)
        padded = [column + [""] * (height - len(column)) for column in columns]
        return [
            "  ".join(part.ljust(w) for part, w in zip(line, widths, strict=True)).rstrip()
            for line in zip(*padded, strict=True)
        ]

    body = [line for row in cells[1:] for line in lines(row)]
    return "\n".join([*lines(cells[0]), "  ".join("-" * width for width in widths), *body])


def _aligned(parts: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(part.ljust(width) for part, width in zip(parts, widths, strict=True)).rstrip()


def size_text(count: float) -> str:
    """Bytes in three digits: 1.2 GB, 34 MB, 5 B."""
    for unit, many in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= many:
            return f"{count / many:.3g} {unit}"
    return f"{count:.0f} B"


def html_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table with its own colours; cell texts are escaped."""
    head = "".join(f'<th style="{_CELL};border-bottom:2px solid #a0aec0">{escape(text)}</th>' for text in headers)
    body = "".join(
        f'<tr style="{_ROW}">'
        + "".join(f'<td style="{_CELL}">{escape(text).replace(chr(10), "<br>")}</td>' for text in row)
        + "</tr>"
        for row in rows
    )
    return f'<table style="{_STYLE}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
