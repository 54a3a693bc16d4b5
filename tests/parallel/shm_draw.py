"""Random sequences of calls, the same whatever the backend."""

import random
import threading

import torch
import torch.distributed as dist
from shm_functions import join

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "avg": dist.ReduceOp.AVG}
SIZES = (0, 1, 7, 100, 4099, 70_001)


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
