"""What ranks of a pool compute in the tests of the shared-memory backend."""

import contextlib
import os
import random
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from mmlab.parallel import shm

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "avg": dist.ReduceOp.AVG}
SIZES = (0, 1, 7, 100, 4099, 70_001)


def join(rank, world, host, port, backend="shm", limit=30.0, **settings):
    """Start torch.distributed and return the store."""
    shm.register(**settings)
    wait = timedelta(seconds=limit)
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=30))
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=wait)
    return store


class Draw:
    """A random sequence of calls, the same on every rank; contents depend on the rank and are small whole numbers."""

    def __init__(self, seed, rank, world, group=None):
        self.choose, self.rank, self.world, self.group = random.Random(seed), rank, world, group
        self.values = torch.Generator().manual_seed(1000 * seed + rank)

    def tensor(self, shape, dtype):
        values = torch.randint(0, 5, tuple(shape), generator=self.values).to(dtype)
        if len(shape) == 2 and self.choose.random() < 0.3:
            return values.t().contiguous().t()  # other strides, the same elements
        return values

    def call(self):
        """One call; returns the tensors that it filled."""
        name = self.choose.choice([n for n in dir(self) if n.startswith("do_")])
        dtype = self.choose.choice((*DTYPES, torch.bool))
        return getattr(self, name)(self.choose.choice(SIZES), dtype)

    def do_all_reduce(self, size, dtype):
        if dtype == torch.bool:
            dtype = torch.float32
        data = self.tensor((size, 2), dtype)
        op = OPS[self.choose.choice(("sum", "max", "min"))]
        work = dist.all_reduce(data, op=op, group=self.group, async_op=self.choose.random() < 0.5)
        if work is not None:
            work.wait()
        return [data]

    def do_coalesced(self, size, dtype):
        data = [self.tensor((size + i,), torch.float32) for i in range(3)]
        with dist._coalescing_manager(group=self.group, async_ops=True) as many:
            for tensor in data:
                dist.all_reduce(tensor, group=self.group)
        many.wait()
        return data

    def do_all_gather(self, size, dtype):
        data = self.tensor((size,), dtype)
        found = [torch.empty_like(data) for _ in range(self.world)]
        dist.all_gather(found, data, group=self.group)
        return found

    def do_all_gather_flat(self, size, dtype):
        data = self.tensor((size, 2), dtype)
        found = torch.empty(size * self.world, 2, dtype=dtype)
        dist.all_gather_into_tensor(found, data.contiguous(), group=self.group)
        return [found]

    def do_reduce_scatter(self, size, dtype):
        if dtype == torch.bool:
            dtype = torch.int32
        found = torch.empty(size, dtype=dtype)
        dist.reduce_scatter_tensor(found, self.tensor((size * self.world,), dtype), group=self.group)
        return [found]

    def do_average(self, size, dtype):
        """What FSDP2 asks for: the mean, whole and in shares. gloo cannot: there it is a sum, divided."""
        whole, share = self.tensor((size, 2), torch.float64), torch.empty(size, dtype=torch.float32)
        parts = self.tensor((size * self.world,), torch.float32)
        gloo = dist.get_backend(self.group) == "gloo"
        op = dist.ReduceOp.SUM if gloo else dist.ReduceOp.AVG
        dist.all_reduce(whole, op=op, group=self.group)
        work = dist.reduce_scatter_tensor(share, parts, op=op, group=self.group, async_op=True)
        work.wait()
        return [whole / self.world, share / self.world] if gloo else [whole, share]

    def do_flat_coalesced(self, size, dtype):
        """all_gather_into_tensor and reduce_scatter_tensor of several tensors at once, as FSDP2 issues them."""
        data = [self.tensor((size + i,), dtype) for i in range(3)]
        found = [torch.empty(self.world * len(tensor), dtype=dtype) for tensor in data]
        with dist._coalescing_manager(group=self.group, async_ops=True) as many:
            for out, tensor in zip(found, data, strict=True):
                dist.all_gather_into_tensor(out, tensor, group=self.group)
        many.wait()
        data = [self.tensor((self.world * (size + i),), torch.float32) for i in range(3)]
        shares = [torch.empty(size + i) for i in range(3)]
        with dist._coalescing_manager(group=self.group, async_ops=True) as many:
            for out, tensor in zip(shares, data, strict=True):
                dist.reduce_scatter_tensor(out, tensor, group=self.group)
        many.wait()
        return found + shares

    def do_object_lists(self, size, dtype):
        """What distributed checkpoints use: plans gathered at a root, scattered and broadcast from it."""
        root = self.choose.randrange(self.world)
        mine = {"rank": self.rank, "text": "x" * (size % 1000)}
        everyone = [None] * self.world if self.rank == root else None
        dist.gather_object(mine, everyone, group_dst=root, group=self.group)
        out, shared = [None], [everyone]
        dist.scatter_object_list(out, everyone, group_src=root, group=self.group)
        dist.broadcast_object_list(shared, group_src=root, group=self.group)
        ranks = [item["rank"] for item in shared[0]]
        return [torch.tensor([out[0]["rank"], len(out[0]["text"]), *ranks])]

    def do_broadcast(self, size, dtype):
        data = self.tensor((size, 2), dtype)
        dist.broadcast(data, group_src=self.choose.randrange(self.world), group=self.group)
        return [data]

    def do_all_to_all(self, size, dtype):
        table = [[self.choose.randrange(size + 1) for _ in range(self.world)] for _ in range(self.world)]
        mine, theirs = table[self.rank], [row[self.rank] for row in table]
        found = torch.empty(sum(theirs), dtype=dtype)
        dist.all_to_all_single(found, self.tensor((sum(mine),), dtype), theirs, mine, group=self.group)
        return [found]

    def do_gather(self, size, dtype):
        root, data = self.choose.randrange(self.world), self.tensor((size,), dtype)
        found = [torch.empty_like(data) for _ in range(self.world)] if root == self.rank else None
        dist.gather(data, found, group_dst=root, group=self.group)
        return found or []

    def do_scatter(self, size, dtype):
        root, found = self.choose.randrange(self.world), torch.empty(size, dtype=dtype)
        parts = [self.tensor((size,), dtype) for _ in range(self.world)] if root == self.rank else None
        dist.scatter(found, parts, group_src=root, group=self.group)
        return [found]

    def do_reduce(self, size, dtype):
        root, data = self.choose.randrange(self.world), self.tensor((size,), torch.float64)
        dist.reduce(data, group_dst=root, group=self.group)
        return [data] if root == self.rank else []

    def do_barrier(self, size, dtype):
        dist.barrier(group=self.group)
        return []

    def do_objects(self, size, dtype):
        found = [None] * self.world
        dist.all_gather_object(found, {"rank": self.rank, "text": "x" * size}, group=self.group)
        return [torch.tensor([len(item["text"]) + item["rank"] for item in found])]

    def do_ring(self, size, dtype):
        """Two messages to the next rank, received in the other order."""
        if size == 0:
            return []  # gloo's receive of nothing returns at once and leaves the message
        following, before = (self.rank + 1) % self.world, (self.rank - 1) % self.world
        first, second = self.tensor((size,), dtype), self.tensor((3,), torch.float32)
        found = [torch.empty(3), torch.empty(size, dtype=dtype)]
        sends = [
            dist.isend(first, group_dst=following, tag=5, group=self.group),
            dist.isend(second, group_dst=following, tag=6, group=self.group),
        ]
        dist.recv(found[0], group_src=before, tag=6, group=self.group)
        dist.irecv(found[1], group_src=before, tag=5, group=self.group).wait()
        for send in sends:
            send.wait()
        return found


def sequence(rank, world, host, port, backend, seed, calls):
    """The results of a random sequence of calls."""
    join(rank, world, host, port, backend)
    draw = Draw(seed, rank, world)
    return [draw.call() for _ in range(calls)]


def several_groups(rank, world, host, port, backend, calls):
    """Threads of one process, each with a group of its own, at once."""
    join(rank, world, host, port, backend)
    groups = [dist.new_group(list(range(world))) for _ in range(3)]
    results, errors = {}, []

    def run(index):
        draw = Draw(index, rank, world, groups[index])
        try:
            results[index] = [draw.call() for _ in range(calls)]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]
    return [results[index] for index in range(3)]


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
    began = time.monotonic()
    send = dist.isend(data, 1 - rank)
    returned = time.monotonic() - began
    dist.barrier()
    found = torch.empty_like(data)
    if rank == 0:
        dist.recv(found)  # from whoever sends
    else:
        dist.recv(found, 0)
    send.wait()
    return {"same": torch.equal(found, torch.arange(3_000_000) * (2 - rank)), "returned": returned, "done": True}


def overlap(rank, world, host, port):
    """An async call is driven on while nobody waits for it; calls of two groups in another order on each rank."""
    join(rank, world, host, port)
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    data = [torch.ones(2_000_000), torch.ones(2_000_000)]
    order = [0, 1] if rank == 0 else [1, 0]
    works = {index: dist.all_reduce(data[index], group=groups[index], async_op=True) for index in order}
    end = time.monotonic() + 20
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
    store = join(rank, world, host, port, limit=1.0)
    dist.barrier()
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
        result["at"] = time.monotonic()
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
        return {"error": str(error), "at": time.monotonic()}
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
