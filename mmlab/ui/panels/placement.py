"""Hosts, ranks and the groups among them."""

from __future__ import annotations

from typing import Any

from mmlab.tracking.bottleneck import Bottleneck
from mmlab.tracking.placement import LONG, Placement
from mmlab.tracking.traffic import PURPOSE
from mmlab.ui.panel import RunPanel


class PlacementPanel(RunPanel):
    """Which rank is where and how it is, what goes between them. Requests: `doctor` (what holds the run up)."""

    name = "placement"
    title = "Placement"
    spoken = ("now.*.6", "places.*.4", "slowest", "lines")
    every = 1.0
    lasting = True
    slow = frozenset({"doctor"})

    def placement(self) -> Placement:
        """As the record tells it, of the steps that the feed has seen last."""
        return self.feed.record.placement(self.feed.state, list(self.feed.last_steps))

    def frame(self) -> dict[str, Any]:
        """Hosts [[name, ranks]], ranks (what stays, and what changes), links by axis, what makes steps slow."""
        found, steps = self.placement(), list(self.feed.last_steps)
        return {
            "state": found.state,
            "hosts": [list(host) for host in found.hosts],
            "places": [[r.rank, r.role, r.engine, r.pid, r.holds] for r in found.ranks],
            "now": [
                [r.state, r.phase, r.step, r.microbatch, int(r.seconds) if r.seconds >= LONG else 0, r.behind, r.why]
                for r in found.ranks
            ],
            "links": [
                [row.axis, PURPOSE[row.axis], row.groups, [float(f"{count:.3g}") for count in row.bytes]]
                for row in found.traffic.rows
            ],
            "slowest": Bottleneck(self.feed.plan, steps).sentence if steps else "",
        }

    def handle(self, verb: str, args: dict[str, Any]) -> Any:
        """`doctor`: its findings as lines."""
        if verb != "doctor":
            raise ValueError(f"unknown request {verb!r}")
        return {"lines": self.source.run.doctor().text.splitlines()}

    def text(self) -> str:
        """Tables of ranks and of groups."""
        return str(self.placement())

    def html(self) -> str:
        """The picture of the plan's layout, and the tables."""
        return f"<div>{self.feed.plan.layout().svg()}{self.placement().html()}</div>"
