"""Views of plans, which need no run."""

from __future__ import annotations

import threading

from mmlab.plan import Plan
from mmlab.ui.panels.schedule import PlannedPanel
from mmlab.ui.part import Part


class PlanSource:
    """A plan, which does not change."""

    state = ""
    ended = False
    cuts = 0
    reading = None

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def look(self) -> None:
        """There is nothing new."""


def schedule_view(plan: Plan) -> Part:
    """The schedule of a plan as a live picture."""
    return Part(PlanSource(), [PlannedPanel(plan)], "Pipeline schedule of a plan")
