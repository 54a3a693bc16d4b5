"""What lies where in the shared file of one group, and the reader that looks at it from outside. No torch.

All words are 8 bytes, aligned, and written by one rank each (doorbells and the
abort word excepted, where any write will do). On x86-64 such stores are seen
whole and in order by the other ranks, which is why nothing else is accepted.

    header   magic, ranks, slot bytes, ring bytes, abort word, token, name, global ranks
    ranks    one block each: flag, signatures, doorbell, process, record of calls
    rings    two counters for each ordered pair of ranks
    data     two slots for each rank, then one ring for each ordered pair
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path

MAGIC = 0x316D68736C616D6D  # "mmlabsh1", little endian
PAGE = 4096
HEADER, BLOCK, RING_BLOCK = 8192, 512, 256
MAX_RANKS = 256

# word indices in the header
RANKS, SLOT_BYTES, RING_BYTES, ABORT, TOKEN, NAME, GLOBAL = 1, 2, 3, 8, 16, 32, 64
NAME_BYTES = 256
# word indices in a rank's block; flag, signatures and doorbell are written often, so each has cache lines of its own
FLAG, SIGNATURES, DOOR, ASLEEP, PID, STARTED, CLOSED = 0, 8, 16, 17, 32, 33, 34
CALL, CALL_OP, CALL_BYTES, CALL_TIME, CALLS_DONE = 40, 41, 42, 43, 44
P2P_OP, P2P_PEER, P2P_TAG, P2P_BYTES, P2P_TIME = 48, 49, 50, 51, 52
CALL_SHAPE, P2P_SHAPE, SHAPE_WORDS = 53, 58, 5
# word indices in a ring's block
HEAD, TAIL = 0, 16

OPS = (
    "none", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "gather", "scatter", "reduce",
    "barrier", "send", "recv",
)  # fmt: skip


@dataclass(frozen=True)
class Layout:
    """Offsets in bytes for a group of `ranks` with two slots of `slot` bytes a rank and a ring of `ring` a pair."""

    ranks: int
    slot: int
    ring: int

    @classmethod
    def within(cls, ranks: int, total: int) -> Layout:
        """Split about `total` bytes: half for the slots, half for the rings; at least one page each."""

        def pages(size: int) -> int:
            return max(PAGE, size // PAGE * PAGE)

        return cls(ranks, pages(total // 2 // (2 * ranks)), pages(total // 2 // max(1, ranks * (ranks - 1))))

    @property
    def _data(self) -> int:
        control = HEADER + self.ranks * BLOCK + self.ranks * self.ranks * RING_BLOCK
        return (control + PAGE - 1) // PAGE * PAGE

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self._data + 2 * self.ranks * self.slot + self.ranks * (self.ranks - 1) * self.ring

    def block(self, rank: int) -> int:
        """Word index of a rank's block."""
        return (HEADER + rank * BLOCK) // 8

    def ring_block(self, source: int, target: int) -> int:
        """Word index of the counters of a ring."""
        return (HEADER + self.ranks * BLOCK + (source * self.ranks + target) * RING_BLOCK) // 8

    def slot_at(self, rank: int, parity: int) -> int:
        """Byte offset of one of a rank's two slots."""
        return self._data + (2 * rank + parity) * self.slot

    def ring_at(self, source: int, target: int) -> int:
        """Byte offset of the ring from one rank to another."""
        pair = source * (self.ranks - 1) + (target if target < source else target - 1)
        return self._data + 2 * self.ranks * self.slot + pair * self.ring


def write_shape(words: memoryview, at: int, shape: tuple[int, ...]) -> None:
    """Record the first sizes of a tensor, ended by -1 where there is room."""
    for index, size in enumerate(shape[:SHAPE_WORDS]):
        words[at + index] = size
    if len(shape) < SHAPE_WORDS:
        words[at + len(shape)] = -1


def _read_shape(words: memoryview, at: int) -> tuple[int, ...]:
    sizes = words[at : at + SHAPE_WORDS].tolist()
    return tuple(sizes[: sizes.index(-1)] if -1 in sizes else sizes)


def process_start(pid: int) -> int:
    """When a process of this host started, in clock ticks since boot; 0 if there is none, or only its zombie."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] in (b"Z", b"X") else int(fields[19])


@dataclass(frozen=True)
class RankCalls:
    """What one rank last did in one group.

    `rank` in the whole world; `entered` number of the last collective it entered, `done` of the last that it
    completed: it is inside `op` (of `bytes` bytes, since `time`, seconds since the epoch) where they differ.
    `p2p` is a send or recv that it waits in: (op, peer's world rank, tag, bytes, since), else None. `shape` and
    `p2p_shape` are those of the tensors, their first sizes.
    """

    rank: int
    pid: int
    entered: int
    done: int
    op: str
    bytes: int
    time: float
    p2p: tuple[str, int, int, int, float] | None
    closed: bool
    shape: tuple[int, ...] = ()
    p2p_shape: tuple[int, ...] = ()


@dataclass(frozen=True)
class GroupCalls:
    """One group as its shared file (its inode) shows it; `group` what it is for, `ranks` in group order."""

    file: int
    group: str
    aborted: bool
    ranks: tuple[RankCalls, ...]

    @property
    def missing(self) -> tuple[int, ...]:
        """World ranks that have not entered the collective in which others already are."""
        latest = max((rank.entered for rank in self.ranks), default=0)
        inside = any(rank.entered == latest and rank.done < latest for rank in self.ranks)
        return tuple(rank.rank for rank in self.ranks if inside and rank.entered < latest)


def _group_calls(file: int, words: memoryview) -> GroupCalls:
    layout = Layout(words[RANKS], words[SLOT_BYTES], words[RING_BYTES])
    everyone = [words[GLOBAL + rank] for rank in range(layout.ranks)]
    found = []
    for rank in range(layout.ranks):
        at = layout.block(rank)
        p2p = None
        if words[at + P2P_OP]:
            peer = words[at + P2P_PEER]
            p2p = (
                OPS[words[at + P2P_OP]], everyone[peer] if peer >= 0 else -1, words[at + P2P_TAG],
                words[at + P2P_BYTES], words[at + P2P_TIME] / 1e9,
            )  # fmt: skip
        process, closed = words[at + PID], bool(words[at + CLOSED])
        entered, done, op = words[at + CALL], words[at + CALLS_DONE], OPS[words[at + CALL_OP]]
        size, since = words[at + CALL_BYTES], words[at + CALL_TIME] / 1e9
        shapes = _read_shape(words, at + CALL_SHAPE), _read_shape(words, at + P2P_SHAPE)
        found.append(RankCalls(everyone[rank], process, entered, done, op, size, since, p2p, closed, *shapes))
    name = bytes(words[NAME : NAME + NAME_BYTES // 8]).rstrip(b"\0").decode(errors="replace")
    return GroupCalls(file, name, bool(words[ABORT]), tuple(found))


def read_calls(pid: int) -> list[GroupCalls]:
    """The groups that a process of this host is in and what every rank of them last entered.

    Works from any process of the same user while the ranks hang: the files have no name any more, but the process
    still has them open. A process that is gone has no groups.
    """
    groups: dict[int, GroupCalls] = {}
    try:
        links = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:
        return []
    for link in links:
        try:
            if "/mmlab-shm-" not in os.readlink(link):
                continue
            descriptor = os.open(link, os.O_RDONLY)
        except OSError:
            continue
        try:
            status = os.fstat(descriptor)
            if status.st_ino in groups or status.st_size < HEADER:
                continue
            with mmap.mmap(descriptor, status.st_size, prot=mmap.PROT_READ) as mapped:
                view = memoryview(mapped)
                words = view.cast("q")
                if words[0] == MAGIC:
                    groups[status.st_ino] = _group_calls(status.st_ino, words)
                words.release()
                view.release()
        finally:
            os.close(descriptor)
    return sorted(groups.values(), key=lambda group: group.group)
