"""The torch.distributed backend "shm": a ProcessGroup for CPU ranks of one host."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FakeProcessGroup

from mmlab.parallel.shm.collectives import Collectives, op_name
from mmlab.parallel.shm.progress import Progress
from mmlab.parallel.shm.segment import HOST_BYTES, Segment, meet
from mmlab.parallel.shm.tensors import Outputs, as_bytes, flat, numbered, total_size
from mmlab.parallel.shm.work import PeerLost, ShmWork, Steps


def _live() -> list[ShmGroup]:
    """The shared-memory groups of this process that have not been destroyed."""
    return [group for group in list(dist.distributed_c10d._world.pg_map) if isinstance(group, ShmGroup)]


def _siblings() -> list[Progress]:
    return [group.progress for group in _live()]


def abort_groups() -> int:
    """Make every rank that waits, or will wait, in a shared-memory group of this process or of its peers raise.

    Callable from any thread; returns the number of groups. The waiting ranks raise PeerLost within half a second.
    Afterwards destroy the groups (`destroy_process_group()`) before new ones are made.
    """
    groups = _live()
    for group in groups:
        group.abort()
    return len(groups)


_ProcessGroup: Any = dist.ProcessGroup
"""Its stubs list every overload; torch calls a group in one form only, and that is what is written here."""


class _Named(_ProcessGroup):
    """What torch.distributed asks of a group written in Python: its name, and a backend for the device "cpu".

    The backend is only looked at, never called: it says "cpu" where torch asks for a group's devices.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, backend: Any) -> None:
        super().__init__(rank, size)
        self._rank, self._size, self._store, self._name = rank, size, store, ""
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
        self._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        """torch's name of the group."""
        return self._name

    def rank(self) -> int:
        """This process's rank in the group."""
        return self._rank

    def size(self) -> int:
        """Ranks of the group."""
        return self._size

    def get_group_store(self) -> dist.Store:
        """The group's part of the rendezvous store."""
        return self._store


class GlooFallback(_Named):
    """gloo under the name of a shared-memory group, where there is no shared memory. `transport` says why."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta, transport: str) -> None:
        gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
        super().__init__(store, rank, size, gloo)
        self.transport = transport


class ShmGroup(_Named):
    """A group over shared memory. `transport` says where its file lies.

    Every call returns a work object; async ones go on while this rank computes. A call that cannot be finished raises
    PeerLost (a `torch.distributed.DistError`), and so does every later call of the group.
    """

    def __init__(self, store: dist.Store, rank: int, timeout: timedelta, segment: Segment, transport: str) -> None:
        size = segment.layout.ranks
        super().__init__(store, rank, size, FakeProcessGroup._create_internal(rank, size))
        self.transport = transport
        self._segment = segment
        self.progress = Progress(segment, timeout, _siblings)
        self._rounds = Collectives(segment)

    def getBackendName(self) -> str:
        """The name of the backend."""
        return "shm"

    def _get_backend_name(self) -> str:
        return "shm"

    def abort(self) -> None:
        """Make every rank that waits in this group raise."""
        with self.progress.lock:
            if self._segment.mapped is not None:
                self._segment.abort()

    def shutdown(self) -> None:
        """Leave the group: what peers still wait for from this rank fails for them."""
        self.progress.close()
        self._rounds.close()

    def set_timeout(self, timeout: timedelta) -> None:
        """How long later calls may wait."""
        self.progress.timeout = timeout.total_seconds()

    def _set_sequence_number_for_group(self) -> None:
        """Calls are numbered from the start."""

    def _get_sequence_number_for_group(self) -> int:
        """Collectives that this rank has issued."""
        return self.progress.calls

    def _set_group_desc(self, desc: str) -> None:
        """Say what the group is for, also in its file, for whoever looks from outside."""
        super()._set_group_desc(desc)
        if desc != "undefined":  # what torch calls groups without a description
            self._segment.write_name("world" if desc == "default_pg" else desc)

    def _call(
        self,
        op: str,
        outputs: Outputs | None,
        steps: Callable[[int], Steps],
        data: Sequence[Tensor],
        opts: Any,
        result: Any = None,
    ) -> ShmWork:
        """Start a collective; `data` is what this rank gives or gets."""
        found = result if result is not None else (outputs.tensors if outputs else [])
        work = ShmWork(self.progress, found, outputs.finish if outputs else None)
        work.shape = tuple(data[0].shape) if data else ()
        return self.progress.start(op, total_size(data), work, steps, bool(getattr(opts, "asyncOp", True)))

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> ShmWork:
        """Reduce one tensor over all ranks, in place."""
        return self._reduce_all(tensors, opts)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> ShmWork:
        """Reduce several tensors over all ranks, in place."""
        return self._reduce_all(tensors, opts)

    def _reduce_all(self, tensors: list[Tensor], opts: Any, root: int = -1) -> ShmWork:
        outputs, op = Outputs(tensors), op_name(opts.reduceOp if opts is not None else dist.ReduceOp.SUM)
        rounds = self._rounds

        def steps(number: int) -> Steps:
            for data, first in numbered(outputs.flat, number):
                yield from rounds.all_reduce(first, data, op, root)

        if len(outputs.flat) == 1:
            return self._call(
                "all_reduce" if root < 0 else "reduce", outputs,
                lambda number: rounds.all_reduce(number, outputs.flat[0], op, root), tensors, opts,
            )  # fmt: skip
        return self._call("all_reduce" if root < 0 else "reduce", outputs, steps, tensors, opts)

    def reduce(self, tensors: list[Tensor], opts: Any) -> ShmWork:
        """Reduce a tensor over all ranks, in place on the root, which alone gets the result."""
        return self._reduce_all(tensors, opts, opts.rootRank)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> ShmWork:
        """Collect every rank's tensor on all ranks."""
        return self._gather(outputs[0], inputs[0], opts, outputs)

    def _gather(self, outputs: list[Tensor], data: Tensor, opts: Any, result: Any = None, root: int = -1) -> ShmWork:
        mine, outs = as_bytes(data), Outputs(outputs)
        if root in (-1, self._rank):
            self._same_sizes(outs.bytes, mine.numel(), len(outputs))
        return self._call(
            "all_gather" if root < 0 else "gather", outs,
            lambda number: self._rounds.all_gather(number, outs.bytes, mine, root), [data], opts, result,
        )  # fmt: skip

    def _same_sizes(self, parts: list[Tensor], size: int, count: int) -> None:
        if count != self._size or any(part.numel() != size for part in parts):
            sizes = [part.numel() for part in parts]
            raise ValueError(f"shm: {self._size} tensors of {size} bytes are needed, one a rank, not {sizes}")

    def all_gather_single(self, output: Tensor, data: Tensor, opts: Any = None) -> ShmWork:
        """Collect every rank's tensor in one tensor, in rank order."""
        return self.all_gather_single_coalesced([output], [data], opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> ShmWork:
        """Several times `all_gather_single` in one call."""
        outs, mine = Outputs(outputs), [as_bytes(data) for data in inputs]
        parts = []
        for out, data in zip(outs.bytes, mine, strict=True):
            if out.numel() != self._size * data.numel():
                raise ValueError(f"shm: {out.numel()} bytes cannot hold {data.numel()} of each of {self._size} ranks")
            parts.append([out[rank * data.numel() : (rank + 1) * data.numel()] for rank in range(self._size)])

        def steps(number: int) -> Steps:
            for (out, data), first in numbered(zip(parts, mine, strict=True), number):
                yield from self._rounds.all_gather(first, out, data)

        return self._call("all_gather", outs, steps, inputs, opts)

    def allgather_coalesced(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> ShmWork:
        """Several times `allgather` in one call; `outputs[rank][i]` is the rank's i-th tensor."""
        outs, mine = [Outputs(row) for row in outputs], [as_bytes(data) for data in inputs]
        columns = [[row.bytes[i] for row in outs] for i in range(len(inputs))]
        for column, data in zip(columns, mine, strict=True):
            self._same_sizes(column, data.numel(), len(outputs))

        def steps(number: int) -> Steps:
            for (column, data), first in numbered(zip(columns, mine, strict=True), number):
                yield from self._rounds.all_gather(first, column, data)
            for row in outs:
                if row.finish is not None:
                    row.finish()

        return self._call("all_gather", None, steps, inputs, opts, outputs)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> ShmWork:
        """Reduce a list of tensors, one a rank; each rank keeps its own."""
        whole = torch.cat([flat(part) for part in inputs[0]])
        return self.reduce_scatter_single_coalesced(outputs, [whole], opts)

    def reduce_scatter_single(self, output: Tensor, data: Tensor, opts: Any = None) -> ShmWork:
        """Reduce a tensor; each rank keeps its share of it."""
        return self.reduce_scatter_single_coalesced([output], [data], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> ShmWork:  # fmt: skip
        """Several times `reduce_scatter_single` in one call."""
        outs, data = Outputs(outputs), [flat(tensor) for tensor in inputs]
        op = op_name(opts.reduceOp if opts is not None else dist.ReduceOp.SUM)
        for out, whole in zip(outs.flat, data, strict=True):
            if whole.numel() != self._size * out.numel() or whole.dtype != out.dtype:
                text = f"{whole.numel()} x {whole.dtype} do not make {self._size} shares of {out.numel()} x {out.dtype}"
                raise ValueError(f"shm: {text}")

        def steps(number: int) -> Steps:
            for (out, whole), first in numbered(zip(outs.flat, data, strict=True), number):
                yield from self._rounds.reduce_scatter(first, out, whole, op)

        return self._call("reduce_scatter", outs, steps, inputs, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> ShmWork:
        """The root's tensor on all ranks."""
        outs = Outputs(tensors)
        return self._call(
            "broadcast", outs, lambda number: self._rounds.broadcast(number, outs.bytes[0], opts.rootRank),
            tensors, opts,
        )  # fmt: skip

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> ShmWork:
        """Collect every rank's tensor on the root."""
        return self._gather(outputs[0] if outputs else [], inputs[0], opts, outputs, opts.rootRank)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> ShmWork:
        """Give each rank its tensor of the root's list."""
        outs, parts = Outputs(outputs), [as_bytes(part) for part in (inputs[0] if inputs else [])]
        if self._rank == opts.rootRank:
            self._same_sizes(parts, outs.bytes[0].numel(), len(parts))
        return self._call(
            "scatter", outs, lambda number: self._rounds.scatter(number, outs.bytes[0], parts, opts.rootRank),
            outputs, opts,
        )  # fmt: skip

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> ShmWork:
        """Give rank r the r-th tensor of the list; sizes may differ."""
        outs, parts = Outputs(outputs), [as_bytes(part) for part in inputs]
        return self._call(
            "all_to_all", outs, lambda number: self._rounds.all_to_all(number, outs.bytes, parts), inputs, opts
        )

    def all_to_all_single(
        self, output: Tensor, data: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> ShmWork:  # fmt: skip
        """Give rank r the r-th block of rows; equal blocks where no sizes are given."""
        outs = Outputs([output])
        into, parts = self._blocks(outs.bytes[0], output, output_sizes), self._blocks(as_bytes(data), data, input_sizes)
        return self._call(
            "all_to_all", outs, lambda number: self._rounds.all_to_all(number, into, parts), [data], opts
        )  # fmt: skip

    def _blocks(self, data: Tensor, tensor: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        rows = tensor.shape[0] if tensor.dim() else 1
        if not sizes and rows % self._size:
            raise ValueError(f"shm: {rows} rows cannot be split over {self._size} ranks")
        sizes = sizes or [rows // self._size] * self._size
        if sum(sizes) != rows or len(sizes) != self._size:
            raise ValueError(f"shm: split sizes {list(sizes)} do not fit {rows} rows and {self._size} ranks")
        row = data.numel() // rows if rows else 0
        return list(data.split([size * row for size in sizes]))

    def barrier(self, opts: Any = None) -> ShmWork:
        """Wait for all ranks."""
        return self._call("barrier", None, self._rounds.barrier, [], opts)

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> ShmWork:
        """Start sending; complete when the last byte is in shared memory, whatever the receiver does by then."""
        data = as_bytes(tensors[0])
        work = ShmWork(self.progress, [])
        work.note = ("send", peer, tag, data.numel())
        work.shape = tuple(tensors[0].shape)
        return self.progress.start_mail(work, lambda w: self.progress.mail.send(data, peer, tag, w), True)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> ShmWork:
        """Start receiving a message of this tag from a peer, -1 for any peer."""
        outs = Outputs(tensors)
        data = outs.bytes[0]
        work = ShmWork(self.progress, outs.tensors, outs.finish)
        work.note = ("recv", peer, tag, data.numel())
        work.shape = tuple(tensors[0].shape)
        return self.progress.start_mail(work, lambda w: self.progress.mail.receive(data, peer, tag, w), False)

    def recv_anysource(self, tensors: list[Tensor], tag: int) -> ShmWork:
        """Start receiving a message of this tag from whoever sends it."""
        return self.recv(tensors, -1, tag)

    def _start_coalescing(self, device: torch.device) -> None:
        """Calls are issued one by one."""

    def _end_coalescing(self, device: torch.device) -> ShmWork:
        work = ShmWork(self.progress, [])
        work.complete()
        return work

    def monitored_barrier(self, *args: Any, **kwargs: Any) -> None:
        """Not needed: a barrier that times out says which ranks did not come."""
        self.barrier().wait()

    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def register(host_bytes: int = HOST_BYTES, folders: tuple[str, ...] | None = None) -> None:
    """Make the backend "shm" known to torch.distributed; may be called again, also with other settings.

    `host_bytes` bounds the files of all groups of a host together; `folders` are tried in turn (default /dev/shm, then
    the temporary folder). Where none has room, or the ranks do not share a host, the group is made with gloo; its
    `transport` says so, and `transports` collects what all groups say.
    """
    places = folders or ("/dev/shm", tempfile.gettempdir())

    def create(options: Any, _: Any) -> dist.ProcessGroup:
        store, rank = options.store, options.group_rank
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        segment, transport = meet(store, rank, ranks, str(options.group_id), host_bytes, places)
        if segment is None:
            return GlooFallback(store, rank, options.group_size, options.timeout, transport)
        return ShmGroup(store, rank, options.timeout, segment, transport)

    dist.Backend.register_backend("shm", create, extended_api=True, devices=["cpu"])


def transports() -> list[str]:
    """What the shared-memory groups of this process use and why, each answer once: BEST where all is well."""
    groups = list(dist.distributed_c10d._world.pg_map)
    return sorted({group.transport for group in groups if isinstance(group, ShmGroup | GlooFallback)})


__all__ = ["GlooFallback", "PeerLost", "ShmGroup", "abort_groups", "register", "transports"]
