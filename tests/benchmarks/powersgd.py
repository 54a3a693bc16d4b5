"""What PowerSGD costs where bytes cost next to nothing: a bucket of 4 MB by factors, beside an all-reduce of it.

The bucket is a decoder block of width 288 (seven matrices and two norms). Sides are warm ranks that reduce it in turns,
over shared memory and over gloo on the loopback device, so that whatever else the machine does hits all; medians, the
slowest rank counts. `coding` is the part that a rank itself computes, `sent` what it hands to collectives. On a link of
B MB/s a bucket saves (4 MB - sent) / B and costs `coding`: at 100 Mbit/s (12.5 MB/s) it saves 0.3 s.

    python tests/benchmarks/powersgd.py [--ranks 2 4] [--factors 1 4 16] [--rounds 15] [--json FILE]
"""

from __future__ import annotations

import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import bench_report

WIDTH, INNER = 288, 768
SHAPES = {
    "q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "o": (WIDTH, WIDTH),
    "gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER), "norm1": (WIDTH,), "norm2": (WIDTH,),
}  # fmt: skip


def reductions(rank: int, world: int, host: str, port: int, factors: list[int], rounds: int) -> Any:
    """By (backend, columns of the factors; 0 for the all-reduce): (seconds, seconds of coding) of every reduction, and
    bytes handed to collectives by one."""
    import torch
    import torch.distributed as dist

    from mmlab.parallel import shm
    from mmlab.parallel.compression.feedback import Kept, Packed
    from mmlab.parallel.compression.sums import make_sum
    from mmlab.parallel.compression.wire import Wire
    from mmlab.parallel.traffic import Traffic
    from mmlab.plan.schema import GroupCommunication

    shm.register()
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    groups = {backend: dist.new_group(backend=backend) for backend in ("shm", "gloo")}
    shapes = {name: torch.Size(shape) for name, shape in SHAPES.items()}
    torch.manual_seed(rank)
    gradient = torch.randn(sum(shape.numel() for shape in shapes.values()))
    sums = {r: make_sum(GroupCommunication(compressor="powersgd" if r else "none", rank=r or 1)) for r in (0, *factors)}
    sides = [(backend, r) for backend in groups for r in sums]
    packed = {side: Packed(gradient.clone(), shapes, Kept()) for side in sides}
    seconds: dict[tuple[str, int], list[tuple[float, float]]] = {side: [] for side in sides}
    sent: dict[tuple[str, int], int] = {}
    for turn in range(rounds + 1):
        for side in sides if turn % 2 else reversed(sides):
            traffic = Traffic()
            packed[side].flat.copy_(gradient)
            dist.barrier()
            began, coding = time.perf_counter(), 0.0
            steps = sums[side[1]].rounds(packed[side], Wire(groups[side[0]], "language", traffic), 1.0)
            while True:
                entered = time.perf_counter()
                work = next(steps, None)
                coding += time.perf_counter() - entered
                if work is None:
                    break
                work.wait()
            if turn:  # the first round warms up
                seconds[side].append((time.perf_counter() - began, coding))
            sent[side] = traffic.bytes["language"]
    return {"seconds": seconds, "sent": sent}


def measure(worlds: list[int], factors: list[int], rounds: int) -> list[dict[str, Any]]:
    """One row for each number of ranks, backend and columns of the factors, with medians in milliseconds and their
    ratio to the all-reduce's."""
    from mmlab.cluster.pool import RankPool

    rows: list[dict[str, Any]] = []
    with RankPool(max(worlds)) as pool:
        for world in worlds:
            results = pool.run(reductions, factors, rounds, ranks=world, timeout=600)
            for backend in ("shm", "gloo"):
                for r in (0, *factors):
                    taken = [
                        [1e3 * statistics.median(part) for part in zip(*found["seconds"][backend, r], strict=True)]
                        for found in results
                    ]
                    whole, coding = (max(times) for times in zip(*taken, strict=True))
                    sent = results[0]["sent"][backend, r]
                    rows.append(
                        {"ranks": world, "backend": backend, "columns": r, "sent": sent, "ms": whole, "coding": coding}
                    )
                dense = rows[-1 - len(factors)]["ms"]
                for row in rows[-1 - len(factors) :]:
                    row["ratio"] = row["ms"] / dense
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    lines = [f"{'ranks':<7}{'backend':<9}{'side':<13}{'sent kB':>9}{'ms':>9}{'coding ms':>11}{'/ all-reduce':>14}"]
    for row in rows:
        side = f"powersgd {row['columns']}" if row["columns"] else "all-reduce"
        lines.append(
            f"{row['ranks']:<7}{row['backend']:<9}{side:<13}{row['sent'] / 1e3:>9.0f}{row['ms']:>9.2f}"
            f"{row['coding']:>11.2f}{row['ratio']:>14.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = bench_report.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--factors", type=int, nargs="+", default=[1, 4, 16], help="columns of the factors")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    import powersgd  # by its own name, under which the ranks find the functions

    rows = powersgd.measure(given.ranks, given.factors, given.rounds)
    print(bench_report.machine())
    print(table(rows))
    bench_report.keep(rows, given.json)


if __name__ == "__main__":
    main()
