"""Ways to sum a tensor over two hosts, over gloo, against the time that the link needs for the bits.

Two ranks on two hosts (network namespaces; Linux and root). All ways take turns in the same ranks, each after a pause;
a number is the median over the calls, of the slower rank. With each of them as many bytes as the tensor has cross the
link either way, so the bits need bytes * 8 / rate. With --alternate four ranks sum in one all-reduce, dealt to the
hosts in turns: every hop of gloo's ring then crosses the link, with three times the bytes.

    python tests/benchmarks/link_exchanges.py [--rate 100mbit] [--mb 1 4 16] [--calls 9] [--json FILE]
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import bench_report

PAUSE = 0.1


# -- the ranks


def ways(rank: int, data: Any) -> dict[str, Any]:
    """Functions that sum `data` (float32, of an even length) over two ranks, in place."""
    import torch
    import torch.distributed as dist

    other, half = 1 - rank, data.numel() // 2
    mine, theirs = data.split(half)[rank], data.split(half)[other]
    whole, part = torch.empty_like(data), torch.empty_like(mine)

    def collectives() -> None:
        dist.all_to_all_single(whole, data)
        torch.add(*whole.split(half), out=part)
        dist.all_gather_into_tensor(data, part)

    def swap(out: Any, given: Any, receive_first: bool) -> None:
        works = [dist.irecv(out, other)] if receive_first else []
        works.append(dist.isend(given, other))
        works += [] if receive_first else [dist.irecv(out, other)]
        for work in works:
            work.wait()

    def halves(receive_first: bool) -> None:
        swap(part, theirs, receive_first)
        mine.add_(part)
        swap(theirs, mine.clone(), receive_first)

    def wholes() -> None:
        swap(whole, data.clone(), True)
        data.add_(whole)

    return {
        "all_reduce": lambda: dist.all_reduce(data),
        "all_to_all + all_gather": collectives,
        "halves, send first": lambda: halves(False),
        "halves, receive first": lambda: halves(True),
        "wholes, receive first": wholes,
    }


def call_in_turns(rank: int, world: int, host: str, port: int, megabytes: list[float], calls: int) -> Any:
    """Seconds of every call: {(way, MB): [...]}."""
    import torch
    import torch.distributed as dist

    store = dist.TCPStore(host, port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    found: dict[tuple[str, float], list[float]] = {}
    for mb in megabytes:
        data = torch.ones(round(mb * 1e6) // 8 * 2)
        sides = ways(rank, data) if world == 2 else {"all_reduce": lambda data=data: dist.all_reduce(data)}
        for turn in range(calls + 1):
            for name, call in sides.items():
                data.fill_(1.0)
                time.sleep(PAUSE)
                dist.barrier()
                began = time.perf_counter()
                call()
                seconds = time.perf_counter() - began
                assert bool((data == world).all()), name
                if turn:  # the first one opens connections and windows
                    found.setdefault((name, mb), []).append(seconds)
    return found


# -- the table


def measure(rate: str, megabytes: list[float], calls: int, alternate: bool) -> list[dict[str, Any]]:
    """One row for each way and size: milliseconds, what the bits need, their ratio."""
    from mmlab.cluster.netns import Shape, two_hosts
    from mmlab.cluster.pool import RankPool

    shape = Shape.parse(rate)
    with two_hosts(shape) as hosts, RankPool(4 if alternate else 2, hosts=hosts * 2) as pool:
        ranks = pool.run("link_exchanges:call_in_turns", megabytes, calls, timeout=600)
    rows = []
    for name, mb in ranks[0]:
        seconds = statistics.median(map(max, *(found[name, mb] for found in ranks)))
        # a ring of four sends 2 * 3/4 of the data over each hop, and two of the hops lead either way
        need = (3.0 if alternate else 1.0) * mb * 8e6 / shape.rate
        rows.append({"way": name, "mb": mb, "ms": 1e3 * seconds, "link_ms": 1e3 * need, "ratio": seconds / need})
    return rows


def main() -> None:
    """Measure and print."""
    parser = bench_report.parser(__doc__)
    parser.add_argument("--rate", default="100mbit", help="bits a second, each way")
    parser.add_argument("--mb", type=float, nargs="+", default=[1.0, 4.0, 16.0])
    parser.add_argument("--calls", type=int, default=9)
    parser.add_argument("--alternate", action="store_true", help="four ranks, dealt to the hosts in turns")
    given = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))

    rows = measure(given.rate, given.mb, given.calls, given.alternate)
    print(bench_report.machine())
    print(f"{'way':<26}{'MB':>6}{'ms':>10}{'bits need':>12}{'ratio':>8}")
    for row in rows:
        print(f"{row['way']:<26}{row['mb']:>6g}{row['ms']:>10.1f}{row['link_ms']:>12.1f}{row['ratio']:>8.2f}")
    bench_report.keep(rows, given.json)


if __name__ == "__main__":
    main()
