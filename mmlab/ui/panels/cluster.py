"""A lab: its state, its engines with the ranks on them, its runs."""

from __future__ import annotations

from html import escape
from typing import Any

from mmlab.cluster.registry import status_text
from mmlab.plan.tables import html_table, text_table
from mmlab.ui.lab_source import LabSource
from mmlab.ui.panel import Panel

HEADER = ("engine", "pid", "host", "memory", "rank", "role", "alive")


class Cluster(Panel):
    """State, engines and runs of a lab; more engines for it, and the button that closes it."""

    name = "cluster"
    title = "Lab"
    spoken = ("reason", "runs.*.reason")
    every = 1.0
    slow = frozenset({"close", "grow"})

    def __init__(self, source: LabSource) -> None:
        self.source = source

    def frame(self) -> dict[str, Any]:
        """The lab's status, a row for each engine and run, the other live labs."""
        source = self.source
        runs = [{key: value for key, value in run.items() if key != "ranks"} for run in source.runs]
        return {**source.status, "rows": source.engines, "runs": runs[::-1], "others": source.others}

    def handle(self, verb: str, args: dict[str, Any]) -> Any:
        """`grow`: start engines until there are args["engines"]. `close`: end them and all that the lab has started."""
        if verb == "grow":
            self.source.lab.grow(args.get("engines"))
        elif verb == "close":
            self.source.lab.close()
        else:
            raise ValueError(f"unknown request {verb!r}")
        return {"state": self.source.lab.status()["state"]}

    def _line(self) -> str:
        return f"lab {status_text(self.source.status)}"

    def _cells(self) -> list[list[str]]:
        return [
            [str(row["engine"]), str(row["pid"]), row["host"], _memory(row), _text(row["rank"]), _text(row["role"]),
             {True: "yes", False: "no", None: "not known"}[row["alive"]]]
            for row in self.source.engines
        ]  # fmt: skip

    def text(self) -> str:
        """The lab in a line, a table of its engines, its runs."""
        cells = self._cells()
        runs = [f"run {run['name']}: {run['state']}, step {run['step']} of {run['steps']}" for run in self.source.runs]
        return "\n".join([self._line(), *([text_table(HEADER, cells)] if cells else []), *runs[::-1]])

    def html(self) -> str:
        """The same tables."""
        cells = self._cells()
        rows = [[run["name"], run["state"], f"{run['step']} of {run['steps']}"] for run in self.source.runs[::-1]]
        tables = [html_table(HEADER, cells)] if cells else []
        tables += [html_table(("run", "state", "step"), rows)] if rows else []
        return f"<p>{escape(self._line())}</p>" + "".join(tables)


def _memory(row: dict[str, Any]) -> str:
    return "" if row["memory"] is None else f"{row['memory'] / 1e6:.0f} MB"


def _text(value: Any) -> str:
    return "" if value is None else str(value)
