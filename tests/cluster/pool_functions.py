"""Functions that ranks of a pool run in tests."""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def join(rank: int, world: int, host: str, port: int) -> None:
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=30))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=30))


def total(rank: int, world: int, host: str, port: int, scale: float, power: int = 1) -> tuple[float, int]:
    join(rank, world, host, port)
    value = torch.tensor([scale * (rank + 1) ** power])
    dist.all_reduce(value)
    return value.item(), torch.get_num_threads()


def fail(rank: int, world: int, host: str, port: int, failing: int) -> None:
    join(rank, world, host, port)
    if rank == failing:
        raise KeyError("scripted")
    dist.barrier()


def hang(rank: int, world: int, host: str, port: int) -> None:
    if rank == 1:
        sleeping_on_purpose()


def sleeping_on_purpose() -> None:
    time.sleep(600)


def die(rank: int, world: int, host: str, port: int) -> None:
    if rank == 1:
        print("last words", flush=True)
        os._exit(7)
