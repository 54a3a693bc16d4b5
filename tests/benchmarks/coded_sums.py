"""What compressing costs: each codec alone, and the sum of a bucket over shared memory, where bytes cost little.

The first table is one process: a chunk of half a bucket, encoded and decoded; GB/s are of the gradients, not of the
payload. The second are ranks that reduce a bucket with each compressor (error feedback where it has one) and with an
all-reduce, in turns, so that whatever else the machine does hits all of them; medians, the slowest rank counts.
`coding` is the processor time of what the rank itself computes, `sent` what it hands to collectives.

    python tests/benchmarks/coded_sums.py [--ranks 2 4] [--mb 4] [--rounds 15] [--json FILE]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import bench_report

NAMES = ("none", "bf16", "fp16", "int8", "topk", "powersgd", "onebit")
CODECS = tuple(name for name in NAMES if name != "powersgd")


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


def reductions(rank: int, world: int, host: str, port: int, megabytes: float, rounds: int) -> Any:
    """By compressor: (seconds, processor seconds of coding) of every reduction, and bytes handed over by one."""
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
    dist.init_process_group("shm", store=store, rank=rank, world_size=world)
    assert dist.group.WORLD is not None
    torch.manual_seed(rank)
    gradient = torch.randn(round(megabytes * 1e6 / 4))
    matrix = torch.Size([gradient.numel() // 500, 500])  # as PowerSGD takes it
    sums = {name: make_sum(GroupCommunication(compressor=name)) for name in NAMES}
    packed = {name: Packed(gradient.clone(), {"all": matrix}, Kept()) for name in NAMES}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in NAMES}
    sent: dict[str, int] = {}
    for turn in range(rounds + 1):
        for name in NAMES if turn % 2 else reversed(NAMES):
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


def together(worlds: list[int], megabytes: float, rounds: int) -> list[dict[str, Any]]:
    """One row for each number of ranks and compressor, with medians in milliseconds and their ratio to all-reduce."""
    from mmlab.cluster.pool import RankPool

    rows: list[dict[str, Any]] = []
    with RankPool(max(worlds)) as pool:
        for world in worlds:
            results = pool.run(reductions, megabytes, rounds, ranks=world, timeout=600)
            for name in NAMES:
                taken = [
                    [1e3 * statistics.median(part) for part in zip(*r["seconds"][name], strict=True)] for r in results
                ]
                whole, coding = max(t for t, _ in taken), max(c for _, c in taken)
                rows.append(
                    {"codec": name, "ranks": world, "ms": whole, "coding": coding, "sent": results[0]["sent"][name]}
                )
            dense = rows[-len(NAMES)]["ms"]
            for row in rows[-len(NAMES) :]:
                row["ratio"] = row["ms"] / dense
    return rows


def table(single: list[dict[str, Any]], rows: list[dict[str, Any]]) -> str:
    """Both tables as text."""
    lines = [f"{'codec':<8}{'encode GB/s':>13}{'decode GB/s':>13}{'smaller':>10}{'lost':>10}"]
    lines += [
        f"{row['codec']:<8}{row['encode']:>13.1f}{row['decode']:>13.1f}{row['smaller']:>10.1f}{row['lost']:>10.4f}"
        for row in single
    ]
    lines += ["", f"{'ranks':<8}{'codec':<8}{'sent kB':>10}{'ms':>9}{'coding ms':>11}{'/ all-reduce':>14}"]
    lines += [
        f"{row['ranks']:<8}{row['codec']:<8}{row['sent'] / 1e3:>10.0f}{row['ms']:>9.2f}{row['coding']:>11.2f}"
        f"{row['ratio']:>14.2f}"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = bench_report.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mb", type=float, default=4.0, help="size of a bucket, in MB (1e6 bytes)")
    parser.add_argument("--rounds", type=int, default=15)
    given = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))
    import coded_sums  # by its own name, under which the ranks find the functions

    single = coded_sums.alone(given.mb, given.rounds)
    rows = coded_sums.together(given.ranks, given.mb, given.rounds)
    print(bench_report.machine())
    print(table(single, rows))
    bench_report.keep(single + rows, given.json)


if __name__ == "__main__":
    main()
