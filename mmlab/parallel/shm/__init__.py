"""Collectives and messages through shared memory, for CPU ranks of one x86-64 Linux host.

`register()`, then `dist.init_process_group("shm", ...)` and `dist.new_group(...)` as with any backend.
"""

from mmlab.messages.shared_file import GroupCalls, RankCalls, read_calls
from mmlab.parallel.shm.group import GlooFallback, PeerLost, ShmGroup, abort_groups, register, transports
from mmlab.parallel.shm.segment import BEST, refusal

__all__ = [
    "BEST",
    "GlooFallback",
    "GroupCalls",
    "PeerLost",
    "RankCalls",
    "ShmGroup",
    "abort_groups",
    "read_calls",
    "refusal",
    "register",
    "transports",
]
