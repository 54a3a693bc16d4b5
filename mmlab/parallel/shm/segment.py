"""The shared file of one group: made, mapped by every rank, nameless; and what is said through its words."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import secrets
import socket
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mmlab.messages import shared_file as at
from mmlab.messages.shared_file import Layout

GROUP_BYTES = 8 << 20
"""Most bytes of one group's file: slots of 1 MiB for two ranks, 512 KiB for four. Twice as much made 4 MB calls no
faster; with half, 4 ranks took 1.4 times as long."""
HOST_BYTES = 256_000_000
"""Bytes that the files of all groups of a host take together, unless the plan says otherwise."""
BEST = "shared memory in /dev/shm"
"""What a group's `transport` says where all is well."""
_FUTEX = 202  # number of the system call on x86-64
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1


def refusal() -> str:
    """Why this machine cannot have shared-memory groups; empty where it can."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return f"shared-memory collectives need Linux on x86-64 (this is {sys.platform} on {platform.machine()})"
    return ""


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def _take(folder: str, size: int) -> int:
    """A file of `size` bytes without a name, every byte really there; its descriptor. OSError when space is short."""
    path = os.path.join(folder, f"mmlab-shm-{secrets.token_hex(8)}")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.unlink(path)  # at once: nothing is left of it whatever happens to the ranks
        os.posix_fallocate(descriptor, 0, size)  # else a full /dev/shm would be a SIGBUS at some later write
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def create(ranks: int, size: int, folders: tuple[str, ...]) -> tuple[int, Layout, str, str]:
    """Take a group's file in the first folder that has room: (descriptor, layout, folder, why not in those before).

    About `size` bytes, less where a quarter of what the folder has free is less. OSError when none has room.
    """
    reasons: list[str] = []
    for folder in folders:
        try:
            found = os.statvfs(folder)
            layout = Layout.within(ranks, min(size, found.f_bavail * found.f_frsize // 4))
            return _take(folder, layout.size), layout, folder, "; ".join(reasons)
        except OSError as error:
            reasons.append(f"{folder} has no room ({error.strerror})")
    raise OSError("; ".join(reasons))


class Segment:
    """One rank's view of the mapped file.

    `words` are its 8-byte words, `tensor` its bytes as uint8. `flags[rank]` is the index of a rank's flag word.
    """

    def __init__(self, descriptor: int, layout: Layout, rank: int) -> None:
        self.layout, self.rank = layout, rank
        self.mapped: mmap.mmap | None = mmap.mmap(descriptor, layout.size)  # has a descriptor of its own
        self.words = memoryview(self.mapped).cast("q")
        with torch.inference_mode(False):
            self.tensor: Tensor | None = torch.frombuffer(self.mapped, dtype=torch.uint8)
        self._address = self.tensor.data_ptr()
        self._syscall = ctypes.CDLL(None).syscall
        self._syscall.restype = ctypes.c_long
        self._syscall.argtypes = [ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
        self.me = layout.block(rank)
        self.others = [other for other in range(layout.ranks) if other != rank]
        self.flags = [layout.block(other) + at.FLAG for other in range(layout.ranks)]
        self._bells = {other: layout.block(other) for other in self.others}

    def introduce(self) -> None:
        """Say which process this rank is."""
        self.words[self.me + at.PID] = os.getpid()
        self.words[self.me + at.STARTED] = at.process_start(os.getpid())

    def write_name(self, name: str) -> None:
        """Name the group for whoever looks from outside; any rank may, all write the same."""
        text = name.encode()[: at.NAME_BYTES].ljust(at.NAME_BYTES, b"\0")
        for index in range(at.NAME_BYTES // 8):
            self.words[at.NAME + index] = int.from_bytes(text[8 * index : 8 * index + 8], "little", signed=True)

    def put_words(self, offset: int, values: list[int]) -> None:
        """Write words at an offset in bytes."""
        for index, value in enumerate(values, offset // 8):
            self.words[index] = value

    def get_words(self, offset: int, count: int) -> list[int]:
        """Read words at an offset in bytes."""
        return self.words[offset // 8 : offset // 8 + count].tolist()

    def ring_bell(self, other: int) -> None:
        """Wake one rank if it sleeps."""
        bell = self._bells[other]
        if self.words[bell + at.ASLEEP]:
            self._wake(bell)

    def ring_bells(self) -> None:
        """Wake the ranks that sleep."""
        words = self.words
        for bell in self._bells.values():
            if words[bell + at.ASLEEP]:
                self._wake(bell)

    def _wake(self, bell: int) -> None:
        value = self.words[bell + at.DOOR]
        self.words[bell + at.DOOR] = (value + 1) & 0x7FFFFFFF  # the system call compares 32 bits
        self._syscall(_FUTEX, self._address + 8 * (bell + at.DOOR), _FUTEX_WAKE, 1 << 30, None)

    def sleep(self, door: int, seconds: float) -> None:
        """Sleep until somebody rings, unless the doorbell no longer reads `door`; at most some seconds."""
        limit = _Timespec(0, int(seconds * 1e9))
        self._syscall(
            _FUTEX, self._address + 8 * (self.me + at.DOOR), _FUTEX_WAIT, door, ctypes.addressof(limit)
        )  # fmt: skip

    def abort(self) -> None:
        """Make every rank that waits in this group raise, now and ever after."""
        self.words[at.ABORT] = 1
        for bell in [*self._bells.values(), self.me]:
            self._wake(bell)

    def leave(self) -> None:
        """Say that this rank is gone from the group, and drop the mapping."""
        self.words[self.me + at.CLOSED] = 1
        self.ring_bells()
        self.tensor = None
        self.words.release()
        self.mapped = None

    def gone(self, other: int) -> str:
        """Why a rank will never come again; empty if it may."""
        block = self.layout.block(other)
        pid = self.words[block + at.PID]
        if self.words[block + at.CLOSED]:
            return f"peer rank {self.words[at.GLOBAL + other]} (pid {pid}) left the group"
        if at.process_start(pid) != self.words[block + at.STARTED]:
            return f"connection to peer rank {self.words[at.GLOBAL + other]} (pid {pid}) lost: its process ended"
        return ""


def _write_header(segment: Segment, token: int, name: str, ranks: list[int]) -> None:
    words, layout = segment.words, segment.layout
    words[at.RANKS], words[at.SLOT_BYTES], words[at.RING_BYTES] = layout.ranks, layout.slot, layout.ring
    segment.write_name(name)
    for index, rank in enumerate(ranks):
        words[at.GLOBAL + index] = rank
    words[at.TOKEN] = token
    words[0] = at.MAGIC


def _join(descriptor: int, offer: dict[str, Any], rank: int) -> Segment:
    layout = Layout(*offer["layout"])
    if os.fstat(descriptor).st_size < layout.size:
        raise OSError("the file offered by the first rank is another one")
    segment = Segment(descriptor, layout, rank)
    if rank and segment.words[at.TOKEN] != offer["token"]:
        raise OSError("the file offered by the first rank is another one")
    return segment


def _offer(
    store: dist.Store, name: str, ranks: list[int], folders: tuple[str, ...], host_bytes: int
) -> tuple[int, dict[str, Any]]:
    """Make a group's file of a quarter of what the groups of this host may still have, at most GROUP_BYTES.

    What they took is counted in the rendezvous store, which all ranks of the run see. OSError when too little is left.
    """
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    counter = f"mmlab-shm/{socket.gethostname()}"
    left = host_bytes - store.add(counter, 0)
    if Layout.within(len(ranks), 0).size > left:
        raise OSError(f"cluster.shm_mb leaves {max(0, left) / 1e6:.1f} MB for a group of {len(ranks)} ranks")
    descriptor, layout, folder, reason = create(len(ranks), min(GROUP_BYTES, left // 4), folders)
    store.add(counter, layout.size)
    token = secrets.randbits(62)
    segment = Segment(descriptor, layout, 0)
    _write_header(segment, token, name, ranks)
    return descriptor, {
        "path": f"/proc/{os.getpid()}/fd/{descriptor}", "token": token, "folder": folder, "reason": reason,
        "layout": [layout.ranks, layout.slot, layout.ring],
    }  # fmt: skip


def meet(
    store: dist.Store, rank: int, ranks: list[int], name: str, host_bytes: int, folders: tuple[str, ...]
) -> tuple[Segment | None, str]:  # fmt: skip
    """Make the group's file on its first rank and map it on all: (segment, where it lies and why).

    Every rank gets the same answer: (None, reason) on all if one of them cannot have it. `ranks` are world ranks.
    """
    descriptor, segment, problem = -1, None, refusal()
    offer: dict[str, Any] = {}
    try:
        if rank == 0:
            if not problem:
                try:
                    descriptor, offer = _offer(store, name, ranks, folders, host_bytes)
                except OSError as error:
                    problem = str(error)
            store.set("offer", json.dumps(offer | {"problem": problem}))
        else:
            offer = json.loads(store.get("offer"))
            problem = problem or offer["problem"]
        if not problem:
            try:
                if rank:
                    descriptor = os.open(offer["path"], os.O_RDWR | os.O_CLOEXEC)
                segment = _join(descriptor, offer, rank)
                segment.introduce()
            except OSError as error:
                problem = f"rank {ranks[rank]} cannot map the file of rank {ranks[0]} ({error})"
        problem = _agree(store, "mapped", rank, len(ranks), problem)
        if not problem and segment is not None:
            lost = [reason for other in segment.others if (reason := segment.gone(other))]
            problem = _agree(store, "seen", rank, len(ranks), lost[0] if lost else "")
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    if problem:
        return None, f"gloo ({problem})"
    return segment, f"shared memory in {offer['folder']}" + (f" ({offer['reason']})" if offer["reason"] else "")


def _agree(store: dist.Store, what: str, rank: int, size: int, problem: str) -> str:
    """The first rank's problem of all that have one, the same on every rank."""
    store.set(f"{what}/{rank}", problem or "-")
    answers = (store.get(f"{what}/{other}").decode() for other in range(size))
    return next((answer for answer in answers if answer != "-"), "")


def now() -> int:
    """Nanoseconds since the epoch, for the record of calls."""
    return time.time_ns()
