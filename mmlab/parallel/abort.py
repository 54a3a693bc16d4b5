"""Freeing ranks that are stuck in a collective which can no longer finish.

Shared-memory groups have an abort flag. gloo has not: `ProcessGroup.abort()`
returns on it and unblocks nobody, and a rank inside a gloo wait ignores
SIGINT. Shutting down the sockets that gloo opened does free it. Either way the
stuck call raises within half a second on all sides and the process and its
tensors live on. NCCL groups are aborted through torch.
"""

from __future__ import annotations

import contextlib
import os
import socket

import psutil
from torch.distributed import distributed_c10d

from mmlab.parallel.shm import abort_groups


def _sockets() -> dict[int, tuple[object, object]]:
    connections = psutil.Process().net_connections(kind="tcp")
    return {c.fd: (c.laddr, c.raddr) for c in connections if c.fd >= 0 and c.raddr}


def _abort_nccl() -> int:
    """Abort the communicators of NCCL groups: kernels that wait in them end, and what waits for those raises.

    The process lives on only with TORCH_NCCL_ASYNC_ERROR_HANDLING at 2, which `build_mesh` sets before any group is
    made; 1 and 3 end it. From torch's sources, not tried here: no machine with two GPUs.
    """
    groups = [g for g, (backend, _) in list(distributed_c10d._world.pg_map.items()) if "nccl" in str(backend)]
    for group in groups:
        with contextlib.suppress(RuntimeError):
            group.abort()
    return len(groups)


class Connections:
    """What process groups talk through: shared memory, and the TCP connections that were not there before.

    Make it before the rendezvous, call `mark` after the last group. Until then every new connection counts.
    """

    def __init__(self) -> None:
        self._before = _sockets()
        self._opened: dict[int, tuple[object, object]] | None = None

    def mark(self) -> None:
        """Take note of what was opened since the ledger was made."""
        self._opened = self._since()

    def _since(self) -> dict[int, tuple[object, object]]:
        return {fd: ends for fd, ends in _sockets().items() if self._before.get(fd) != ends}

    def cut(self) -> int:
        """Abort shared-memory groups and shut down the connections that still have the same two ends; how many."""
        count = abort_groups() + _abort_nccl()
        now = _sockets()
        for fd, ends in (self._since() if self._opened is None else self._opened).items():
            if now.get(fd) != ends:
                continue  # closed meanwhile, and the number perhaps reused
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as connection:
                connection.shutdown(socket.SHUT_RDWR)
                count += 1
        return count
