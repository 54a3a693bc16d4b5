"""Collectives and messages through shared memory, for CPU ranks of one x86-64 Linux host.

`register()`, then `dist.init_process_group("shm", ...)` and `dist.new_group(...)` as with any backend.
"""

from mmlab.parallel.shm.group import GlooFallback, PeerLost, ShmGroup, abort_groups, register
from mmlab.parallel.shm.layout import GroupCalls, RankCalls, read_calls
from mmlab.parallel.shm.segment import DEFAULT_BYTES, refusal

__all__ = [
    "DEFAULT_BYTES",
    "GlooFallback",
    "GroupCalls",
    "PeerLost",
    "RankCalls",
    "ShmGroup",
    "abort_groups",
    "read_calls",
    "refusal",
    "register",
]
