"""Shared memory against gloo: one call of each collective, by size and number of ranks.

Both sides are groups of the same warm ranks, which take turns in short blocks, so that whatever else the machine does
hits both. A number is the median of the calls of one rank, the slowest rank counts. `send` is a message there and one
back.

    python tests/benchmarks/collectives.py [--ranks 2 4] [--kib 4 256 4096] [--rounds 8] [--json FILE]
"""

from __future__ import annotations

import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import bench_report

CALLS = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send", "barrier")
BLOCK = {4: 20, 256: 12, 4096: 3}
"""Calls in a block, by KiB."""


# -- the ranks


def caller(name: str, size: int, rank: int, world: int, group: Any) -> Any:
    """A function without arguments that makes one call; `size` bytes of float32 go in on each rank."""
    import torch
    import torch.distributed as dist

    count = max(world, size // 4 // world * world)
    data, large, small = torch.ones(count), torch.empty(count * world), torch.empty(count // world)

    def there_and_back() -> None:
        if rank == 0:
            dist.send(data, group_dst=1, group=group)
            dist.recv(data, group_src=1, group=group)
        elif rank == 1:
            dist.recv(data, group_src=0, group=group)
            dist.send(data, group_dst=0, group=group)

    return {
        "all_reduce": lambda: dist.all_reduce(data.fill_(1.0), group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(large, data, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(small, data, group=group),
        "broadcast": lambda: dist.broadcast(data, group_src=0, group=group),
        "all_to_all": lambda: dist.all_to_all_single(large[:count], data, group=group),
        "send": there_and_back,
        "barrier": lambda: dist.barrier(group=group),
    }[name]


def compare(rank: int, world: int, host: str, port: int, cases: list[tuple[str, int]], rounds: int) -> Any:
    """Seconds of every call: {(name, KiB): {"shm": [...], "gloo": [...]}}."""
    import torch.distributed as dist

    from mmlab.parallel import shm

    shm.register()
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    groups = {"shm": dist.new_group(backend="shm"), "gloo": dist.new_group(backend="gloo")}
    found: dict[tuple[str, int], dict[str, list[float]]] = {}
    for name, kib in cases:
        calls = {side: caller(name, kib << 10, rank, world, group) for side, group in groups.items()}
        seconds: dict[str, list[float]] = {side: [] for side in groups}
        for turn in range(rounds + 1):
            for side in groups if turn % 2 else reversed(groups):
                dist.barrier()
                block = []
                for _ in range(BLOCK.get(kib, 5)):
                    began = time.perf_counter()
                    calls[side]()
                    block.append(time.perf_counter() - began)
                if turn:  # the first round warms up
                    seconds[side] += block
        found[name, kib] = seconds
    return found


# -- the table


def measure(ranks: list[int], kib: list[int], rounds: int) -> list[dict[str, Any]]:
    """One row for each collective, size and number of ranks, with medians in milliseconds and their ratio."""
    from mmlab.cluster.pool import RankPool

    cases = [(name, size) for name in CALLS for size in (kib if name != "barrier" else kib[:1])]
    rows = []
    with RankPool(max(ranks)) as pool:
        for world in ranks:
            results = pool.run(compare, cases, rounds, ranks=world, timeout=600)
            for name, size in cases:
                active = results[:2] if name == "send" else results
                median = {
                    side: 1e3 * max(statistics.median(result[name, size][side]) for result in active)
                    for side in ("shm", "gloo")
                }
                rows.append(
                    {"call": name, "kib": size, "ranks": world, **median, "ratio": median["gloo"] / median["shm"]}
                )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    lines = [f"{'call':<16}{'KiB':>6}{'ranks':>7}{'gloo ms':>10}{'shm ms':>10}{'gloo / shm':>12}"]
    for row in rows:
        lines.append(
            f"{row['call']:<16}{row['kib']:>6}{row['ranks']:>7}{row['gloo']:>10.3f}{row['shm']:>10.3f}{row['ratio']:>12.1f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = bench_report.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--kib", type=int, nargs="+", default=[4, 256, 4096])
    parser.add_argument("--rounds", type=int, default=8)
    given = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    import collectives  # by its own name, under which the ranks find the functions

    rows = collectives.measure(given.ranks, given.kib, given.rounds)
    print(bench_report.machine())
    print(table(rows))
    bench_report.keep(rows, given.json)


if __name__ == "__main__":
    main()
