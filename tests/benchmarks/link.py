"""Steps of two replicas on two hosts with a slow link: dense, every compressor, and DDP with PyTorch's own hooks.

Two ranks with encoder, projector and decoder each, on two hosts (network namespaces, Linux and root) that a shaped link
joins; or, with `--rate none`, on this host. All sides take turns in the same processes, on the same model, microbatch
and process group; a number is the median over a side's steps, each as long as on the slower rank.

"dense" is our step with gloo's all-reduce, "exchanged" the same with values as they are in the two rounds of the coded
sums. DDP has one bucket (with several its PowerSGD hook aborts), `torch.optim.AdamW` and `clip_grad_norm_`; our buckets
are the plan's. Over shared memory that hook is left out: it waits for a collective in the callback of another one, in
the thread that is to drive both. "by bytes" is the gain over dense if a step took what it takes without any exchange of
gradients (also measured, in turn: "alone") and the time of the bits that its host sends, as the kernel counts them,
headers included; "reached" is the measured gain over that.

    python tests/benchmarks/link.py [--rate 100mbit] [--rounds 5] [--steps 2] [--collectives gloo] [--json FILE]
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import bench_report

MODEL = (
    "model.language.hidden=512", "model.language.layers=4", "model.language.heads=8", "model.language.kv_heads=8",
    "parallel.vision=first_stage", "parallel.vision_dp=0", "parallel.dp=2", "parallel.pp=1", "parallel.microbatches=1",
    "data.global_batch=4", "data.seq_len=64", "data.held_out=", "tracking.telemetry=false",
)  # fmt: skip
COMPRESSORS = ("bf16", "fp16", "int8", "topk", "powersgd", "onebit")
RANK = 4
"""Of both PowerSGDs."""
ALONE, DENSE, EXCHANGED = "alone", "dense", "exchanged"
PEERS = ("DDP", "DDP fp16", "DDP PowerSGD")
SIDES = (DENSE, EXCHANGED, ALONE, *COMPRESSORS, *PEERS)
WARM_UP = 3
"""Steps of each side before the clock counts; PyTorch's PowerSGD sends the first two dense."""
COUNTED = "/sys/class/net/link0/statistics/tx_bytes"


# -- the ranks


def our_step(plan: Any, mesh: Any, side: str) -> Callable[[Any], float]:
    """A function that runs one step of the trainer on a batch."""
    import torch

    from mmlab.parallel.compression.codecs import Plain
    from mmlab.parallel.compression.sums import CodedSum
    from mmlab.parallel.watch import Watch
    from mmlab.train.build import build
    from mmlab.train.step import HybridStep, Ride

    if side == ALONE:
        mesh = dataclasses.replace(mesh, reductions=dict.fromkeys(mesh.reductions))
    runner = HybridStep(plan, mesh, build(plan, mesh), Watch(telemetry=False))
    if side == EXCHANGED:
        runner.configure(plan, 1)
        sums = runner.built.reducer.sums
        sums.update(dict.fromkeys(sums, CodedSum(Plain(torch.float32), feedback=False)))
    return lambda batch: runner.train(plan, 1, batch, Ride()).loss


def peer_step(plan: Any, rank: int, side: str) -> Callable[[Any], float]:
    """A function that runs one step of the same model as PyTorch's examples do it."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    from mmlab.models.build import plain_model

    model: Any = DistributedDataParallel(plain_model(plan), bucket_cap_mb=1000)
    if side == "DDP fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif side == "DDP PowerSGD":
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return bench_report.plain_step(model, rank)


def sent() -> float:
    """Bytes that this host has sent over the link; 0 where there is none."""
    counter = Path(COUNTED)
    return float(counter.read_text()) if counter.exists() else 0.0


def compare(
    rank: int, world: int, host: str, port: int, plan_texts: dict[str, str], wanted: list[str], rounds: int, steps: int
) -> dict[str, Any]:
    """ "parameters", and for each side "seconds" and "cpu" (of all threads) of its steps, "sent" and "handed" bytes a
    step."""
    import torch
    import torch.distributed as dist

    from mmlab.data.pipeline import DataSource
    from mmlab.parallel.mesh import build_mesh, close_mesh
    from mmlab.plan import Plan
    from mmlab.train.feed import Feed

    plans = {side: Plan.loads(text) for side, text in plan_texts.items()}
    first = plans[DENSE]
    mesh = build_mesh(first, first.layout(), rank, dist.TCPStore(host, port, is_master=False), torch.device("cpu"))
    feed = Feed(first, mesh, DataSource(first))
    feed.reset(feed.cursors, 0)
    batch = feed.batch()
    sides = {side: our_step(plan, mesh, side) for side, plan in plans.items()}
    peers = PEERS if first.cluster.collectives == "gloo" else PEERS[:-1]
    sides |= {side: peer_step(first, rank, side) for side in peers if side in wanted}
    found: dict[str, Any] = {side: {"seconds": [], "cpu": [], "sent": 0.0, "handed": 0.0} for side in sides}

    def take(side: str, count: int) -> None:
        dist.barrier()
        for _ in range(count):
            began, used = time.perf_counter(), time.process_time()
            sides[side](batch)
            found[side]["seconds"].append(time.perf_counter() - began)
            found[side]["cpu"].append(time.process_time() - used)
        dist.barrier()

    try:
        for side in sides:
            take(side, WARM_UP)
            found[side] |= {"seconds": [], "cpu": []}
        for turn in range(rounds):
            for side in list(sides)[:: 1 if turn % 2 else -1]:
                mesh.traffic.take()
                before = sent()
                take(side, steps)
                found[side]["sent"] += (sent() - before) / (rounds * steps)
                found[side]["handed"] += sum(mesh.traffic.take()) / (rounds * steps)
        return found
    finally:
        feed.close()
        close_mesh(mesh)


# -- the table


def measure(
    rate: str, rounds: int, steps: int, *changes: str, data: str = "emoji", wanted: Sequence[str] = SIDES
) -> list[dict[str, Any]]:
    """One row for each side (dense and alone always): milliseconds of a step, and of its processor time; the gain over
    dense, that by bytes alone, and their ratio; megabytes handed over and sent in a step."""
    from mmlab.cluster.netns import Shape, two_hosts
    from mmlab.cluster.pool import RankPool
    from mmlab.plan import Plan

    base = Plan.load("laptop").with_(*MODEL, f"data.path={data}", *changes)
    plans = dict.fromkeys((DENSE, *([EXCHANGED] if EXCHANGED in wanted else []), ALONE), base)
    for name in (name for name in COMPRESSORS if name in wanted):
        groups = {f"communication.{group}.compressor": name for group in ("vision", "language")}
        plans[name] = base.with_(groups, *(f"communication.{g}.rank={RANK}" for g in ("vision", "language")))
        plans[name].check().raise_if_any()
    texts = {side: plan.dumps() for side, plan in plans.items()}
    if rate == "none":
        bits = float("inf")
        with RankPool(2) as pool:
            ranks = pool.run("link:compare", texts, list(wanted), rounds, steps, timeout=1800)
    else:
        shape = Shape.parse(rate)
        bits = shape.rate
        with two_hosts(shape) as hosts, RankPool(2, hosts=hosts) as pool:
            ranks = pool.run("link:compare", texts, list(wanted), rounds, steps, timeout=1800)
    return in_rows(ranks, bits)


def in_rows(ranks: list[dict[str, Any]], bits: float) -> list[dict[str, Any]]:
    """The rows of `measure`, from what each rank has found; `bits` a second of the link."""
    median = {
        side: {key: statistics.median(map(max, *(found[side][key] for found in ranks))) for key in ("seconds", "cpu")}
        for side in ranks[0]
    }
    size = {side: {key: max(found[side][key] for found in ranks) for key in ("handed", "sent")} for side in median}

    def by_bytes(side: str) -> float:
        return median[ALONE]["seconds"] + 8 * size[side]["sent"] / bits

    return [
        {
            "side": side,
            "ms": 1e3 * median[side]["seconds"],
            "cpu_ms": 1e3 * median[side]["cpu"],
            "gain": median[DENSE]["seconds"] / median[side]["seconds"],
            "by_bytes": by_bytes(DENSE) / by_bytes(side),
            "reached": median[DENSE]["seconds"] / median[side]["seconds"] * by_bytes(side) / by_bytes(DENSE),
            "handed_mb": size[side]["handed"] / 1e6,
            "sent_mb": size[side]["sent"] / 1e6,
        }
        for side in median
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    heads = ("ms", "cpu ms", "steps/s", "gain", "by bytes", "reached", "MB handed", "MB sent")
    lines = [f"{'side':<14}" + "".join(f"{head:>10}" for head in heads)]
    for row in rows:
        gains = f"{row['gain']:>10.2f}{row['by_bytes']:>10.2f}{row['reached']:>10.0%}"
        lines.append(
            f"{row['side']:<14}{row['ms']:>10.1f}{row['cpu_ms']:>10.1f}{1e3 / row['ms']:>10.2f}{gains}"
            f"{row['handed_mb']:>10.2f}{row['sent_mb']:>10.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = bench_report.parser(__doc__)
    parser.add_argument("--rate", default="100mbit", help="bits a second, each way; none: both ranks on this host")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--collectives", default="gloo", choices=("gloo", "shm"), help="shm with --rate none alone")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES, metavar="SIDE", help="these alone")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="changes to the plan")
    given = parser.parse_args()
    if given.collectives == "shm" and given.rate != "none":
        parser.error("two hosts share no memory: --collectives shm goes with --rate none")
    import link  # by its own name, under which the ranks find the functions

    changes = (f"cluster.collectives={given.collectives}", *given.set)
    rows = link.measure(given.rate, given.rounds, given.steps, *changes, wanted=given.sides)
    print(bench_report.machine())
    print(table(rows))
    bench_report.keep(rows, given.json)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
