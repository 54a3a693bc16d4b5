"""A tensor-parallel training step over shared memory against gloo, and against one single-threaded process.

The decoder alone (6 layers, width 256, tp 2): forward, backward and a fused AdamW update of one microbatch. The same
two warm ranks take turns in blocks of steps; for the plain side one rank computes the whole model while the other
sleeps. A number is the median of the steps of the slowest rank.

    python tests/benchmarks/tensor_parallel.py [--tokens 256 1024] [--rounds 8] [--steps 5] [--json FILE]
"""

from __future__ import annotations

import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import bench_report

SIDES = ("shm", "gloo", "plain")
CHANGES = {
    "model.language.hidden": 256, "model.language.layers": 6, "model.language.heads": 8, "model.language.kv_heads": 8,
    "model.language.vocab_size": 1024,
}  # fmt: skip
LENGTH = 64
"""Tokens of a sequence."""


def stepper(plan: Any, tokens: int, tp: Any) -> Any:
    """A function without arguments that makes one step of the whole decoder on a tensor group."""
    import torch

    from mmlab.data.packed import TextSequence, pack
    from mmlab.models.build import Part, build_part
    from mmlab.parallel.buckets import local_tensor

    part = Part(chunks=(range(plan.model.language.layers),), embed=True, head=True)
    model = build_part(plan, part, tp, torch.float32).language
    assert model is not None
    parameters = list(model.parameters())
    values = [torch.nn.Parameter(local_tensor(parameter)) for parameter in parameters]
    optimizer = torch.optim.AdamW(values, fused=True)
    drawn = torch.randint(4, 1024, (tokens // LENGTH, LENGTH + 1), generator=torch.Generator().manual_seed(0)).tolist()
    text = pack([TextSequence(tuple(row[:-1]), tuple(row[1:]), "") for row in drawn], image_id=3)

    def step() -> None:
        loss = model.loss(model(text), text.targets) / tokens
        loss.backward()
        for value, parameter in zip(values, parameters, strict=True):
            assert parameter.grad is not None
            value.grad = local_tensor(parameter.grad)
            parameter.grad = None
        optimizer.step()

    return step


def compare(rank: int, world: int, host: str, port: int, tokens: int, rounds: int, steps: int) -> dict[str, Any]:
    """Seconds of every step by side."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from mmlab.parallel import shm
    from mmlab.parallel.tensor import TensorGroup
    from mmlab.plan import Plan

    shm.register()
    store = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    plan = Plan.preset("quickstart").with_(CHANGES)
    sides = {}
    for side in ("shm", "gloo"):
        group = dist.new_group(backend=side)
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tp",))
        sides[side] = stepper(plan, tokens, TensorGroup(group, rank, world, mesh))
    if rank == 0:
        sides["plain"] = stepper(plan, tokens, TensorGroup())
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    for turn in range(rounds + 1):
        for side in SIDES if turn % 2 else reversed(SIDES):
            dist.barrier()
            for _ in range(steps if side in sides else 0):
                began = time.perf_counter()
                sides[side]()
                if turn:  # the first round warms up
                    found[side].append(time.perf_counter() - began)
    return found


def measure(tokens: int, rounds: int, steps: int) -> dict[str, Any]:
    """Median seconds of a step of each side."""
    from mmlab.cluster.pool import RankPool

    with RankPool(2) as pool:
        results = pool.run("tensor_parallel:compare", tokens, rounds, steps, timeout=900)
    median = {side: max(statistics.median(result[side]) for result in results if result[side]) for side in SIDES}
    return {"tokens": tokens, **median}


def main() -> None:
    """Measure and print."""
    parser = bench_report.parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024], help="tokens of a step")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5, help="steps of a block")
    given = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))

    print(f"decoder, 6 layers, width 256, tp 2, float32; {bench_report.machine()}")
    print(f"{'tokens':>7}{'gloo ms':>10}{'plain ms':>10}{'shm ms':>10}{'gloo / shm':>12}{'plain / shm':>13}")
    rows = []
    for tokens in given.tokens:
        row = measure(tokens, given.rounds, given.steps)
        rows.append(row)
        times = "".join(f"{1e3 * row[side]:>10.1f}" for side in ("gloo", "plain", "shm"))
        print(f"{tokens:>7}{times}{row['gloo'] / row['shm']:>12.2f}{row['plain'] / row['shm']:>13.2f}")
    bench_report.keep(rows, given.json)


if __name__ == "__main__":
    main()
