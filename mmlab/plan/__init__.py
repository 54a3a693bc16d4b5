"""What to run: schema, checks, layout, schedule."""

from mmlab.plan.io import Change, Diff, set_live
from mmlab.plan.keys import Key, known_keys, live_keys
from mmlab.plan.layout import Layout, Place
from mmlab.plan.plan import Plan
from mmlab.plan.presets import preset_names
from mmlab.plan.schedule import Op, Schedule, build_schedule

__all__ = [
    "Change",
    "Diff",
    "Key",
    "Layout",
    "Op",
    "Place",
    "Plan",
    "Schedule",
    "build_schedule",
    "known_keys",
    "live_keys",
    "preset_names",
    "set_live",
]
