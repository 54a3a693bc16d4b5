"""What to run: schema, checks, layout, schedule."""

from mmlab.plan.io import Change, Diff, set_live
from mmlab.plan.keys import Key, known_keys, live_keys
from mmlab.plan.layout import Layout, Place
from mmlab.plan.plan import Plan
from mmlab.plan.presets import preset_names
from mmlab.plan.problems import Fix, Problem, Problems
from mmlab.plan.rules import check_platform
from mmlab.plan.schedule import (
    Op,
    Schedule,
    bubble,
    build_schedule,
    measured_svg,
    measured_timeline,
    schedule_svg,
    simulate,
)

__all__ = [
    "Change",
    "Diff",
    "Fix",
    "Key",
    "Layout",
    "Op",
    "Place",
    "Plan",
    "Problem",
    "Problems",
    "Schedule",
    "bubble",
    "build_schedule",
    "check_platform",
    "known_keys",
    "live_keys",
    "measured_svg",
    "measured_timeline",
    "preset_names",
    "schedule_svg",
    "set_live",
    "simulate",
]
