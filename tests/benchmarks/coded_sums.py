"""What compressing costs: each codec alone, and the sum of a bucket over shared memory, where bytes cost little.

The first table is one process: a chunk of half a bucket, encoded and decoded; GB/s are of the gradients, not of the
payload. The second are ranks that reduce a bucket with each compressor (error feedback where it has one) and with an
all-reduce, in turns, so that whatever else the machine does hits all of them; medians, the slowest rank counts.
`coding` is the processor time of what the rank itself computes, `sent` what it hands to collectives.

    python tests/benchmarks/coded_sums.py [--ranks 2 4] [--backends shm gloo] [--mb 4] [--rounds 15] [--json FILE]
"""

from __future__ import annotations

import itertools
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import bench_report

CODECS = ("none", "bf16", "fp16", "int8", "topk", "onebit")
SIDES: dict[str, dict[str, Any]] = {name: {"compressor": name} for name in CODECS} | {
    f"powersgd {columns}": {"compressor": "powersgd", "rank": columns} for columns in (1, 4, 16)
}
"""What the second table compares, by the plan's settings; the first is the all-reduce."""
MATRICES = 8
"""Parameters in a bucket, as PowerSGD takes it."""


def median_of(call: Callable[[], Any], rounds: int) -> float:
    """Seconds of a call, median; the first one warms up."""
    seconds = []
    for _ in range(rounds + 1):
        began = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds[1:])


def alone(megabytes: float, rounds: int) -> list[dict[str, Any]]:
    """One row for each codec: GB/s of encoding and decoding a chunk of half a bucket, on one thread."""
    import torch

    from mmlab.parallel.compression.codecs import Plain
    from mmlab.parallel.compression.sums import make_codec
    from mmlab.plan.schema import GroupCommunication

    torch.set_num_threads(1)
    x = torch.randn(round(megabytes * 1e6 / 8)) * torch.rand(round(megabytes * 1e6 / 8)) ** 3
    out, rows = torch.empty_like(x), []
    for name in CODECS:
        codec = Plain(x.dtype) if name == "none" else make_codec(GroupCommunication(compressor=name))
        payload = torch.empty(codec.size(x.numel()), dtype=torch.uint8)
        encode = median_of(lambda c=codec, p=payload: c.encode(x, p), rounds)
        decode = median_of(lambda c=codec, p=payload: c.decode(p, out), rounds)
        rows.append(
            {"codec": name, "encode": x.nbytes / encode / 1e9, "decode": x.nbytes / decode / 1e9,
             "smaller": x.nbytes / payload.nbytes, "lost": float((x - out).norm() / x.norm())}
        )  # fmt: skip
    return rows


# -- the ranks


def reductions(rank: int, world: int, host: str, port: int, backend: str, megabytes: float, rounds: int) -> Any:
    """By side: (seconds, processor seconds of coding) of every reduction, and bytes handed over by one."""
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
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)
    assert dist.group.WORLD is not None
    torch.manual_seed(rank)
    matrix = torch.Size([round(megabytes * 1e3 / MATRICES), 250])
    shapes = {f"matrix {i}": matrix for i in range(MATRICES)}
    gradient = torch.randn(MATRICES * matrix.numel())
    sums = {name: make_sum(GroupCommunication(**settings)) for name, settings in SIDES.items()}
    packed = {name: Packed(gradient.clone(), shapes, Kept()) for name in SIDES}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in SIDES}
    sent: dict[str, int] = {}
    for turn in range(rounds + 1):
        for name in SIDES if turn % 2 else reversed(SIDES):
            traffic = Traffic()
            packed[name].flat.copy_(gradient)
            dist.barrier()
            began, coding = time.perf_counter(), 0.0
            steps = sums[name].rounds(packed[name], Wire(dist.group.WORLD, "language", traffic), 1.0)
            while True:
                entered = time.thread_time()
                work = next(steps, None)
                coding += time.thread_time() - entered
                if work is None:
                    break
                work.wait()
            if turn:  # the first round warms up
                seconds[name].append((time.perf_counter() - began, coding))
            sent[name] = traffic.bytes["language"]
    return {"seconds": seconds, "sent": sent}


def together(worlds: list[int], backends: list[str], megabytes: float, rounds: int) -> list[dict[str, Any]]:
    """One row for each number of ranks, backend and side, with medians in milliseconds and their ratio to the
    all-reduce's."""
    from mmlab.cluster.pool import RankPool

    rows: list[dict[str, Any]] = []
    with RankPool(max(worlds)) as pool:
        for world, backend in itertools.product(worlds, backends):
            results = pool.run(reductions, backend, megabytes, rounds, ranks=world, timeout=600)
            for name in SIDES:
                taken = [
                    [1e3 * statistics.median(part) for part in zip(*r["seconds"][name], strict=True)] for r in results
                ]
                whole, coding = (max(times) for times in zip(*taken, strict=True))
                sent = results[0]["sent"][name]
                rows.append(
                    {"side": name, "ranks": world, "backend": backend, "ms": whole, "coding": coding, "sent": sent}
                )
            dense = rows[-len(SIDES)]["ms"]
            for row in rows[-len(SIDES) :]:
                row["ratio"] = row["ms"] / dense
    return rows


def table(single: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    """Both tables as text."""
    lines = [f"{'codec':<8}{'encode GB/s':>13}{'decode GB/s':>13}{'smaller':>10}{'lost':>10}"]
    lines += [
        f"{row['codec']:<8}{row['encode']:>13.1f}{row['decode']:>13.1f}{row['smaller']:>10.1f}{row['lost']:>10.4f}"
        for row in single
    ]
    lines += ["", f"{'ranks':<7}{'backend':<9}{'side':<12}{'sent kB':>9}{'ms':>9}{'coding ms':>11}{'/ all-reduce':>14}"]
    lines += [
        f"{row['ranks']:<7}{row['backend']:<9}{row['side']:<12}{row['sent'] / 1e3:>9.0f}{row['ms']:>9.2f}"
        f"{row['coding']:>11.2f}{row['ratio']:>14.2f}"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = bench_report.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--backends", nargs="+", default=["shm"], help="shm, gloo (on the loopback device)")
    parser.add_argument("--mb", type=float, default=4.0, help="size of a bucket, in MB (1e6 bytes)")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    import coded_sums  # by its own name, under which the ranks find the functions

    single = coded_sums.alone(given.mb, given.rounds)
    rows = coded_sums.together(given.ranks, given.backends, given.mb, given.rounds)
    print(bench_report.machine())
    print(table(single, rows))
    bench_report.keep(single + rows, given.json)


if __name__ == "__main__":
    main()
