"""One rank in a process of its own: `shm_rank.py RANK WORLD PORT`. Rank 1 hangs; the others wait for it."""

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from mmlab.parallel import shm


def main():
    rank, world, port = (int(argument) for argument in sys.argv[1:])
    shm.register()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("shm", store=store, rank=rank, world_size=world)
    pair = dist.new_group([0, 2])
    dist.barrier()
    if rank == 1:
        store.set("hangs", "1")
        time.sleep(600)
    store.get("hangs")
    try:
        if rank == 0:
            dist.recv(torch.empty(5), 1, tag=7)
        else:
            dist.all_reduce(torch.empty(5))
    except dist.DistError as error:
        print(error, flush=True)
    total = torch.ones(1)
    dist.all_reduce(total, group=pair)  # the other group is as it was
    print(total.item(), flush=True)


if __name__ == "__main__":
    main()
