"""What ranks of a pool compute in the tests of the shared-memory backend."""

import contextlib
import os
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from mmlab.parallel import shm


def join(rank, world, host, port, backend="shm", limit=30.0, **settings):
    """Start torch.distributed and return the store."""
    shm.register(**settings)
    wait = timedelta(seconds=limit)
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=30))
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=wait)
    return store


def sums(rank, world, host, port):
    """Float sums of awkward values: every rank's bits, and the sum in rank order; averages; what is refused."""
    join(rank, world, host, port)
    found = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for size in (33, 300_001):
            parts = [torch.randn(size, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(world)]
            total = parts[rank].clone()
            dist.all_reduce(total)
            wide = dtype if dtype.itemsize > 2 else torch.float32
            wanted = parts[0].to(wide)
            for part in parts[1:]:
                wanted = wanted + part
            average = parts[rank].clone()
            dist.all_reduce(average, op=dist.ReduceOp.AVG)
            share = torch.empty(size, dtype=dtype)
            dist.reduce_scatter_tensor(share, parts[rank].repeat(world))
            same = torch.equal(total, wanted.to(dtype)) and torch.equal(share, total)
            close = torch.allclose(average.double(), wanted.double() / world, rtol=4 * torch.finfo(dtype).eps)
            found[f"{dtype} {size}"] = same and close
    flags = torch.tensor([rank == 0, True, False])
    dist.all_reduce(flags)
    found["bool"] = flags.tolist() == [True, True, False]
    found["leaf"] = _leaf(rank, world)
    try:
        dist.all_reduce(torch.ones(1), op=dist._make_nccl_premul_sum(2.0))
    except ValueError as error:
        found["refused"] = "not supported" in str(error)
    return found


def _leaf(rank, world):
    """Parameters, inference tensors and scalars are tensors too."""
    parameter = torch.nn.Parameter(torch.full((3,), float(rank)))
    dist.broadcast(parameter, world - 1)
    with torch.inference_mode():
        scalar = torch.tensor(1.0)
        dist.all_reduce(scalar)
    return parameter.tolist() == [world - 1.0] * 3 and parameter.requires_grad and scalar.item() == world


def big_messages(rank, world, host, port):
    """Both send 24 MB before either receives; the sends go on while the ranks wait for each other."""
    join(rank, world, host, port, host_bytes=4 << 20)
    data = torch.arange(3_000_000, dtype=torch.int64) * (rank + 1)
    send = dist.isend(data, 1 - rank)
    dist.barrier()
    found = torch.empty_like(data)
    if rank == 0:
        dist.recv(found)  # from whoever sends
    else:
        dist.recv(found, 0)
    send.wait()
    return {"same": torch.equal(found, torch.arange(3_000_000) * (2 - rank))}


def overlap(rank, world, host, port):
    """An async call is driven on while nobody waits for it; calls of two groups in another order on each rank."""
    join(rank, world, host, port)
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    data = [torch.ones(2_000_000), torch.ones(2_000_000)]
    order = [0, 1] if rank == 0 else [1, 0]
    works = {index: dist.all_reduce(data[index], group=groups[index], async_op=True) for index in order}
    end = time.monotonic() + 50
    while time.monotonic() < end and not all(work.done for work in works.values()):
        time.sleep(0.01)
    finished = [works[index].done for index in (0, 1)]
    future = dist.all_reduce(torch.full((2,), 3.0), group=groups[0], async_op=True).get_future()
    return {"finished": finished, "sums": [d.sum().item() for d in data], "future": future.wait()[0].tolist()}


def mismatch(rank, world, host, port):
    join(rank, world, host, port, limit=10)
    try:
        if rank == 0:
            dist.all_reduce(torch.ones(3))
        else:
            dist.all_gather_into_tensor(torch.ones(8), torch.ones(4))
    except dist.DistError as error:
        return str(error)


def late(rank, world, host, port):
    """A rank that does not come in time, and what the record says meanwhile."""
    store = join(rank, world, host, port)
    dist.barrier()
    dist.group.WORLD.set_timeout(timedelta(seconds=1))  # only now: until here the other rank may be late
    if rank == 1:
        store.get("done")
        return None
    try:
        dist.all_reduce(torch.ones(5))
    except dist.DistError as error:
        found = [str(error)]
    try:
        dist.barrier()
    except dist.DistError as error:
        found.append(str(error))
    store.set("done", "1")
    return found


def abort(rank, world, host, port, where):
    """Rank 0 and 1 wait in a group of theirs, rank 2 aborts; all raise and build new groups."""
    store = join(rank, world, host, port)
    pair = dist.new_group([0, 1])
    third = dist.new_group([1, 2])
    dist.barrier()
    result = {}
    if rank == 2:
        store.get("stuck")
        time.sleep(0.5)
        calls = {group.group: group for group in shm.read_calls(os.getpid())}
        result["groups"] = len(calls)
        threading.Thread(target=shm.abort_groups).start()
        time.sleep(0.2)
        with contextlib.suppress(dist.DistError):
            dist.barrier()
            result["unharmed"] = True
    else:
        result |= _stuck(rank, store, pair, third, where)
    dist.destroy_process_group()
    fresh = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=30))
    dist.init_process_group("shm", store=dist.PrefixStore("again", fresh), rank=rank, world_size=world)
    total = torch.tensor([rank])
    dist.all_reduce(total)
    return result | {"total": total.item()}


def _stuck(rank, store, pair, third, where):
    data = torch.ones(4)
    if rank == 1:
        store.set("stuck", "1")
    try:
        if rank == 0 and where == "collective":
            dist.all_reduce(data, group=pair)  # which rank 1 never enters
        elif rank == 0:
            dist.recv(data, 1, group=pair)
        else:
            dist.all_reduce(data, group=third)
    except dist.DistError as error:
        return {"error": str(error)}
    return {}


def again(rank, world, host, port, times):
    """Descriptors and mappings of this process after each of many groups."""
    found = []
    for turn in range(times):
        store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=30))
        shm.register(host_bytes=1 << 40)  # what the groups of earlier turns took counts in this store
        dist.init_process_group("shm", store=dist.PrefixStore(str(turn), store), rank=rank, world_size=world)
        group = dist.new_group(list(range(world)))
        dist.all_reduce(torch.ones(10), group=group)
        dist.isend(torch.ones(10), (rank + 1) % world)
        dist.recv(torch.ones(10), (rank - 1) % world)
        dist.barrier()
        dist.destroy_process_group()
        del group, store
        with open("/proc/self/maps") as maps:
            mapped = sum("mmlab-shm" in line for line in maps)
        found.append((len(os.listdir("/proc/self/fd")), mapped))
    return found


def transports(rank, world, host, port, folders, host_bytes):
    """Where the group's file lies when folders are full or missing, and that it works all the same."""
    join(rank, world, host, port, folders=folders, host_bytes=host_bytes)
    data, found = torch.ones(100_000), torch.empty(2)
    dist.all_reduce(data)
    send = dist.isend(torch.full((2,), float(rank)), 1 - rank)
    dist.recv(found, 1 - rank)
    send.wait()
    return dist.group.WORLD.transport, data.sum().item(), found.tolist()


def sizes(rank, world, host, port, host_bytes):
    """Bytes of the files of many groups, and what those say that got none."""
    join(rank, world, host, port, host_bytes=host_bytes)
    for _ in range(30):
        dist.new_group(list(range(world)))
    everyone = list(dist.distributed_c10d._world.pg_map)
    return [g._segment.layout.size for g in everyone if isinstance(g, shm.ShmGroup)], shm.transports()


def crowd(rank, world, host, port, groups):
    """Many groups in use at once: (bytes in /dev/shm of each, what all say they use, sum of sums, bytes left)."""
    join(rank, world, host, port)
    made = [dist.new_group(list(range(world))) for _ in range(groups)]
    data = [torch.ones(500_000) for _ in made]
    for work in [dist.all_reduce(d, group=g, async_op=True) for d, g in zip(data, made, strict=True)]:
        work.wait()
    everyone = [g for g in dist.distributed_c10d._world.pg_map if isinstance(g, shm.ShmGroup)]
    sizes = [g._segment.layout.size for g in everyone if g.transport == shm.BEST]
    found = os.statvfs("/dev/shm")
    return sizes, shm.transports(), sum(d.sum().item() for d in data), found.f_bavail * found.f_frsize


def left_behind(seconds: float = 60.0) -> set[str]:
    """Files of groups that stay in /dev/shm; other processes' are there only until all their ranks have mapped them."""
    left, end = set(os.listdir("/dev/shm")), time.monotonic() + seconds
    while True:
        left = {name for name in left & set(os.listdir("/dev/shm")) if name.startswith("mmlab-shm")}
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.05)
