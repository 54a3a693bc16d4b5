"""Axe, which finds faults of accessibility, over a page. Its script comes with a package: no network."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from playwright.sync_api import Page

RUN = "(where) => axe.run(where, {resultTypes: ['violations']}).then((found) => found.violations)"


def serious(page: Page, where: str = "#cell") -> list[str]:
    """Serious and critical faults of what the page shows below a selector, each with what is at fault."""
    if not page.evaluate("() => 'axe' in window"):
        page.evaluate((files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8"))
    found: list[dict[str, Any]] = page.evaluate(RUN, where)
    return [
        f"{fault['id']} ({fault['impact']}): {node['html'][:200]}: {node['failureSummary']}"
        for fault in found
        if fault["impact"] in ("serious", "critical")
        for node in fault["nodes"]
    ]
