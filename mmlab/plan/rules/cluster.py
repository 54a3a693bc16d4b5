"""What the hosts have for the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator

from mmlab.plan.layout import Layout
from mmlab.plan.problems import Fix, Problem
from mmlab.plan.schema import Plan

WORLD_GROUPS = 4
"""Groups of all ranks: torch's own, forward, backward, control."""


def least_shm_bytes(ranks: int) -> int:
    """Bytes of the smallest shared file of a group: slots and rings of one page, counters and records beside them."""
    control = 8192 + ranks * 512 + ranks * ranks * 256
    return -(-control // 4096) * 4096 + 4096 * ranks * (ranks + 1)


def _host_groups(layout: Layout) -> Iterator[list[int]]:
    """The sizes of the groups on each host, of those that do not cross hosts."""
    families = [layout.tp_groups, layout.cp_groups, layout.language_groups, [layout.vision_ranks]]
    groups = [list(range(layout.world_size))] * WORLD_GROUPS + [group for family in families for group in family]
    for node in layout.nodes:
        host = set(node)
        yield [len(group) for group in groups if len(group) > 1 and host.issuperset(group)]


def anchors(plan: Plan) -> Iterator[Problem]:
    """Anchors are ranks of the plan, each named once."""
    named, world = plan.cluster.anchors, plan.world_size
    right = tuple(sorted({rank for rank in named if rank < world}))
    if len(right) < len(named):
        outside = [rank for rank in named if rank >= world]
        said = f"there are no ranks {outside}: the plan has {world}, from 0 on." if outside else "a rank comes twice."
        fix = Fix("name those there are", (f"cluster.anchors={list(right)}",))
        yield Problem("cluster.anchors", said, fix)


def shared_memory(plan: Plan) -> Iterator[Problem]:
    """The smallest files of the groups of a host fit what the plan gives them."""
    c = plan.cluster
    if c.collectives == "gloo" or c.device == "cuda":
        return
    needed = max(sum(least_shm_bytes(size) for size in sizes) for sizes in _host_groups(Layout(plan))) / 1e6
    if needed > c.shm_mb:
        message = f"the process groups of a host need at least {needed:.1f} MB of shared memory, not {c.shm_mb:g}."
        room = math.ceil(2 * needed)
        fix = Fix("give them twice that, for room to grow", (f"cluster.shm_mb={room}",))
        yield Problem("cluster.shm_mb", message, fix)
