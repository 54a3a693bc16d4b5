"""Steps of zero2 and zero3 against FSDP2, and of two plain replicas against DDP, as PyTorch's own examples apply them.

Two ranks, each with encoder, projector and decoder, the same microbatch of the same data set, the same process group.
The peers: `fully_shard` on every block and on the model, or DistributedDataParallel; `torch.optim.AdamW` on the
model's parameters; `torch.nn.utils.clip_grad_norm_`. Ours: the trainer's own step, with its norms, its one reduction
over all ranks and the encoder whole. All sides take turns in short blocks in the same processes; a number is the median
of a rank's steps, the slower rank counts. Processor time (all threads of the rank) is compared too: what else the
machine does disturbs it less.

    python tests/benchmarks/sharding.py [--rounds 8] [--steps 3] [--collectives shm] [--json FILE]
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import bench_report

MODEL = (
    "model.language.hidden=256", "model.language.layers=6", "model.language.heads=8", "model.language.kv_heads=8",
    "parallel.vision=first_stage", "parallel.vision_dp=0", "parallel.dp=2", "parallel.pp=1", "parallel.microbatches=1",
    "data.global_batch=16", "data.seq_len=64", "data.held_out=", "tracking.telemetry=false",
)  # fmt: skip
OURS: dict[str, tuple[str, ...]] = {
    "none": (),
    "zero1": ("parallel.sharding=zero1",),
    "zero2": ("parallel.sharding=zero2",),
    "zero3": ("parallel.sharding=zero3",),
}
PEERS = {"none": "DDP", "zero2": "FSDP2, kept", "zero3": "FSDP2"}
"""What each of ours is compared with; nothing in torch is zero1 alone."""


# -- the ranks


def our_step(plan: Any, mesh: Any) -> Any:
    """A function that runs one step of the trainer on a batch."""
    from mmlab.parallel.watch import Watch
    from mmlab.train.build import build
    from mmlab.train.step import HybridStep, Ride

    runner = HybridStep(plan, mesh, build(plan, mesh), Watch(telemetry=False))
    return lambda batch: runner.train(plan, 1, batch, Ride()).loss


def peer_step(plan: Any, rank: int, name: str) -> Any:
    """A function that runs one step of the same model as PyTorch's examples do it."""
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    from mmlab.models.build import plain_model

    model: Any = plain_model(plan)
    if name == "DDP":
        model = DistributedDataParallel(model)
    else:
        kept = {"reshard_after_forward": False} if name == "FSDP2, kept" else {}
        for block in (*model.vision.vision_model.encoder.layers, *model.language.model.layers.values()):
            fully_shard(block, **kept)
        fully_shard(model, **kept)
    return bench_report.plain_step(model, rank)


def compare(
    rank: int, world: int, host: str, port: int, plan_texts: dict[str, str], rounds: int, steps: int
) -> dict[str, list[tuple[float, float]]]:
    """(seconds, processor seconds) of every step of each side."""
    import torch
    import torch.distributed as dist

    from mmlab.data.pipeline import DataSource
    from mmlab.parallel.mesh import build_mesh, close_mesh
    from mmlab.plan import Plan
    from mmlab.train.feed import Feed

    plans = {name: Plan.loads(text) for name, text in plan_texts.items()}
    first = plans["none"]
    # The plans differ in sharding alone, so the groups of zero3 serve all: one start of torch.distributed.
    mesh = build_mesh(
        plans["zero3"], plans["zero3"].layout(), rank, dist.TCPStore(host, port, is_master=False), torch.device("cpu")
    )
    feed = Feed(first, mesh, DataSource(first))
    feed.reset(feed.cursors, 0)
    batch = feed.batch()
    sides = {name: our_step(plan, mesh) for name, plan in plans.items()}
    sides |= {peer: peer_step(first, rank, peer) for peer in PEERS.values()}
    seconds: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
    try:
        for turn in range(rounds + 1):
            for side in list(sides)[:: 1 if turn % 2 else -1]:
                dist.barrier()
                for _ in range(steps):
                    began, used = time.perf_counter(), time.process_time()
                    sides[side](batch)
                    if turn:  # the first round warms up
                        seconds[side].append((time.perf_counter() - began, time.process_time() - used))
        return seconds
    finally:
        feed.close()
        close_mesh(mesh)


# -- the table


def measure(data: str, rounds: int, steps: int, *changes: str) -> list[dict[str, Any]]:
    """One row for each of ours: (milliseconds, processor milliseconds) of a step, and of its peer's."""
    from mmlab.cluster.pool import RankPool
    from mmlab.plan import Plan

    base = Plan.load("laptop").with_(*MODEL, f"data.path={data}", *changes)
    plans = {name: base.with_(*case).dumps() for name, case in OURS.items()}
    with RankPool(2) as pool:
        found = pool.run(compare, plans, rounds, steps, ranks=2, timeout=900)
    median = {
        side: [1e3 * max(statistics.median(step[i] for step in result[side]) for result in found) for i in (0, 1)]
        for side in found[0]
    }
    rows = []
    for name in OURS:
        peer = PEERS.get(name, "")
        rows.append({"sharding": name, "ours": median[name], "peer": peer, "theirs": median.get(peer)})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text."""
    lines = [f"{'sharding':<10}{'ours ms':>10}{'cpu ms':>10}{'peer':>14}{'ms':>10}{'cpu ms':>10}{'ratio':>8}{'cpu':>7}"]
    for row in rows:
        ours, theirs = row["ours"], row["theirs"]
        line = f"{row['sharding']:<10}{ours[0]:>10.1f}{ours[1]:>10.1f}"
        if theirs:
            line += f"{row['peer']:>14}{theirs[0]:>10.1f}{theirs[1]:>10.1f}"
            line += f"{ours[0] / theirs[0]:>8.2f}{ours[1] / theirs[1]:>7.2f}"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = bench_report.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--collectives", default="shm")
    given = parser.parse_args()
    import sharding  # by its own name, under which the ranks find the functions

    rows = sharding.measure("emoji", given.rounds, given.steps, f"cluster.collectives={given.collectives}")
    print(bench_report.machine())
    print(table(rows))
    bench_report.keep(rows, given.json)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
