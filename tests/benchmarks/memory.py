"""Bytes of a rank under each sharding: what theory says, what is counted in tensors, what the process needs at most.

Counted are the tensors of weights, gradients (those that the update reads) and optimizer just before the update, and of
gathered weights at their most inside a step. The peak is the largest resident set of the process during a step above
what it had before the model was made (Linux: /proc/self/status, reset for each case); activations, buffers of
communication and the allocator's own needs are in it.

    python tests/benchmarks/memory.py [--dp 2] [--microbatches 1] [--json FILE]
"""

from __future__ import annotations

import ctypes
import gc
import sys
from pathlib import Path
from typing import Any

import bench_report

CASES: dict[str, tuple[str, ...]] = {
    "none": (),
    "zero1": ("parallel.sharding=zero1",),
    "zero2": ("parallel.sharding=zero2",),
    "zero3": ("parallel.sharding=zero3",),
    "zero3, one unit": ("parallel.sharding=zero3", "sharding.language=module"),
}
SIZES = (
    "model.language.hidden=512", "model.language.layers=8", "model.language.heads=8", "model.language.kv_heads=8",
    "model.language.vocab_size=4096", "parallel.pp=1", "data.global_batch=4", "data.seq_len=64", "data.held_out=",
)  # fmt: skip
"""A decoder of 28 million parameters: large beside the encoder and its activations."""


# -- the ranks


def _storage(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _peak(reset: bool = False) -> int:
    """Largest resident set of this process since the last reset, bytes."""
    if reset:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # else what was freed long ago counts
        Path("/proc/self/clear_refs").write_text("5")
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def counted(built: Any) -> dict[str, int]:
    """Bytes of this rank's tensors just before the update."""
    from mmlab.parallel.buckets import local_tensor

    states = [built.optimizer.state(t) for t in built.trained]
    return {
        "weights": _storage(local_tensor(param) for param in built.part.parameters()),
        "gradients": _storage(built.reducer.grads[t.name] for t in built.trained),
        "optimizer": _storage(local_tensor(value) for state in states for value in state.values() if value.dim()),
    }


def watch_gathered(built: Any) -> dict[str, int]:
    """{"gathered": most bytes of whole weights that FSDP2 has had at once}, kept up to date by hooks."""
    from torch.distributed.fsdp import FSDPModule

    from mmlab.parallel.buckets import local_tensor

    most = {"gathered": 0}
    units = [m for m in built.part.modules() if isinstance(m, FSDPModule)]
    sharded = {id(param) for param in built.part.parameters()}

    def look(*_: Any) -> None:
        now = _storage(local_tensor(p) for p in built.part.parameters() if id(p) not in sharded)
        most["gathered"] = max(most["gathered"], now)

    for unit in units:
        unit.register_forward_pre_hook(look)
        unit.register_forward_hook(look)
    return most


def measure_rank(rank: int, world: int, host: str, port: int, plan_text: str, steps: int) -> dict[str, int]:
    """Bytes of one rank: weights, gradients, optimizer, gathered, peak."""
    import torch
    import torch.distributed as dist

    from mmlab.data.pipeline import DataSource
    from mmlab.parallel.mesh import build_mesh, close_mesh
    from mmlab.parallel.watch import Watch
    from mmlab.plan import Plan
    from mmlab.train.build import build
    from mmlab.train.feed import Feed
    from mmlab.train.step import HybridStep, Ride

    plan = Plan.loads(plan_text)
    mesh = build_mesh(plan, plan.layout(), rank, dist.TCPStore(host, port, is_master=False), torch.device("cpu"))
    before = _peak(reset=True)
    built = build(plan, mesh)
    feed = Feed(plan, mesh, DataSource(plan))
    runner = HybridStep(plan, mesh, built, Watch(telemetry=False))
    gathered = watch_gathered(built)
    feed.reset(feed.cursors, 0)
    try:
        found: dict[str, int] = {}
        for step in range(1, steps + 1):
            if step == steps:
                _peak(reset=True)
            batch = feed.batch()
            ride = Ride(next_bad=feed.next_bad, next_size=plan.data.global_batch)
            feed.agree(runner.train(plan, step, batch, ride, lambda _: found.update(counted(built))).next_bad)
        peak = _peak() - before
        return found | gathered | {"peak": peak}
    finally:
        feed.close()
        close_mesh(mesh)


# -- the table


def theory(plan: Any, rank: int) -> dict[str, float]:
    """What `mmlab layout` says of a rank, in its parts."""
    from mmlab.plan.sizes import rank_share

    layout = plan.layout()
    pieces = rank_share(plan, layout, layout.place(rank)).pieces
    return {
        "weights": sum(piece.weight_bytes for piece in pieces),
        "gradients": sum(piece.gradient_bytes for piece in pieces),
        "optimizer": sum(piece.optimizer_bytes for piece in pieces),
        "gathered": sum(4.0 * piece.whole for piece in pieces),
    }


def measure(data: str, dp: int, microbatches: int, steps: int = 2, *changes: str) -> list[dict[str, Any]]:
    """One row for each sharding: theory and measurement of the first decoder rank, in bytes."""
    from mmlab.cluster.pool import RankPool
    from mmlab.plan import Plan

    base = (f"data.path={data}", f"parallel.dp={dp}", f"parallel.microbatches={microbatches}")
    rows = []
    for name, case in CASES.items():
        plan = Plan.load("laptop").with_(*SIZES, *base, *case, *changes)
        with RankPool(plan.world_size) as pool:  # fresh processes: what another case freed would count for this one
            found = pool.run(measure_rank, plan.dumps(), steps, ranks=plan.world_size, timeout=600)
        rows.append({"sharding": name, "theory": theory(plan, 1), "measured": found[1]})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as text, in MB (1e6 bytes): theory / counted, and the peak of the process."""
    parts = ("weights", "gradients", "optimizer", "gathered")
    lines = [f"{'sharding':<18}" + "".join(f"{part:>18}" for part in parts) + f"{'state':>18}{'peak':>10}"]
    for row in rows:
        said, found = row["theory"], row["measured"]
        both = [(said[part], found[part]) for part in parts]
        both.append((sum(said[part] for part in parts[:3]), sum(found[part] for part in parts[:3])))
        cells = "".join(f"{f'{a / 1e6:.1f} / {b / 1e6:.1f}':>18}" for a, b in both)
        lines.append(f"{row['sharding']:<18}{cells}{found['peak'] / 1e6:>10.0f}")
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = bench_report.parser(__doc__)
    parser.add_argument("--dp", type=int, default=2)
    parser.add_argument("--microbatches", type=int, default=1)
    given = parser.parse_args()
    import memory  # by its own name, under which the ranks find the functions

    rows = memory.measure("emoji", given.dp, given.microbatches)
    print(bench_report.machine())
    print(table(rows))
    bench_report.keep(rows, given.json)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
