"""Attention over shared tokens: time, bytes sent and peak of tensor bytes on a rank, ring against Ulysses.

Forward and backward of one attention over one sequence, on 1 (plain kernel), 2 and 4 single-threaded ranks that talk
through shared memory. All variants of a number of ranks take turns in the same warm ranks, so that whatever else the
machine does hits each. A time is the median of the rounds of one rank, the slowest rank counts; bytes are those of the
rank that has most. Counted are tensors alive at once that the attention makes (its inputs are not), by a dispatch mode.

    python tests/benchmarks/context.py [--ranks 1 2 4] [--tokens 1024 4096] [--rounds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

HEADS, KV_HEADS, WIDTH = 8, 4, 64
WINDOW = 256
IMAGE_SIDE = 16
"""Three quarters of the tokens are images of 256 tokens, one after the other, behind a little text (scope "image")."""
VARIANTS = {
    "plain": ("ring", "all", 0),
    "plain, window": ("ring", "all", WINDOW),
    "plain, masked": ("ring", "all", WINDOW),
    "ring": ("ring", "all", 0),
    "ulysses": ("ulysses", "all", 0),
    "ring, image tokens": ("ring", "image", 0),
    "ring, window": ("ring", "all", WINDOW),
}
"""Name -> mode, scope, window; plain ones on one rank alone (masked: one kernel under a whole mask)."""


# -- the ranks


def alive_bytes() -> Any:
    """A context that counts the bytes of tensors made inside it that live at once: `.peak`."""
    import weakref

    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Alive(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.now = self.peak = 0
            self.seen: set[int] = set()

        def _gone(self, key: int, size: int) -> None:
            self.seen.discard(key)
            self.now -= size

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            known = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
            for tensor in tree_leaves(result):
                if not isinstance(tensor, torch.Tensor):
                    continue
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key in self.seen or key in known:
                    continue
                self.seen.add(key)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, key, storage.nbytes())
            return result

    return Alive()


def attention(variant: str, tokens: int, rank: int, world: int) -> Any:
    """(a function that makes one forward and backward, the traffic counter) of this rank."""
    import numpy as np
    import torch
    import torch.distributed as dist

    from mmlab.models.attention import PackedAttention, RingAttention, UlyssesAttention, whole_attention
    from mmlab.parallel.context.blocks import attention_plan
    from mmlab.parallel.context.split import ContextGroup, Pack, split
    from mmlab.parallel.traffic import Traffic

    mode, scope, window = VARIANTS[variant]
    traffic = Traffic()
    make = PackedAttention.of if variant == "plain, masked" else whole_attention
    whole = make((tokens,), window, torch.device("cpu"))
    attend, here = whole, tokens
    if world > 1:
        group = ContextGroup(dist.group.WORLD, rank, world, mode, scope, traffic)
        per_image = IMAGE_SIDE * IMAGE_SIDE
        images = 16 + np.arange(tokens * 3 // 4 // per_image * per_image)
        cut = split(Pack((tokens,), images, IMAGE_SIDE), group)
        here = len(cut.rows[rank])
        if mode == "ulysses":
            attend = UlyssesAttention(whole, tuple(len(rows) for rows in cut.rows), group)
        else:
            attend = RingAttention(attention_plan((tokens,), cut, group, window), group)
    q, k, v = (torch.randn(here, heads, WIDTH, requires_grad=True) for heads in (HEADS, KV_HEADS, KV_HEADS))
    grad = torch.randn(here, HEADS * WIDTH)

    def run() -> None:
        attend(q, k, v).backward(grad)
        for tensor in (q, k, v):
            tensor.grad = None

    return run, traffic


def measure_rank(rank: int, world: int, host: str, port: int, lengths: list[int], rounds: int) -> list[dict[str, Any]]:
    """Seconds of every round, bytes sent and peak bytes of each variant and length."""
    import torch
    import torch.distributed as dist

    from mmlab.parallel import shm

    torch.set_num_threads(1)
    if world > 1:
        shm.register()
        store = dist.TCPStore(host, port, is_master=False)
        dist.init_process_group("shm", store=store, rank=rank, world_size=world)
    rows = []
    for tokens in lengths:
        names = [name for name in VARIANTS if name.startswith("plain") == (world == 1)]
        made = {name: attention(name, tokens, rank, world) for name in names}
        seconds: dict[str, list[float]] = {name: [] for name in names}
        sent, peak = {}, {}
        for name, (run, traffic) in made.items():
            with alive_bytes() as alive:
                run()
            peak[name], sent[name] = alive.peak, traffic.bytes["cp"]
        for _ in range(rounds):
            for name, (run, _) in made.items():
                if world > 1:
                    dist.barrier()
                began = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - began)
        rows += [
            {"variant": name, "tokens": tokens, "seconds": seconds[name], "sent": sent[name], "peak": peak[name]}
            for name in names
        ]
    if world > 1:
        dist.destroy_process_group()
    return rows


# -- the table


def measure(ranks: list[int], lengths: list[int], rounds: int) -> list[dict[str, Any]]:
    """One row for each number of ranks, length and variant: milliseconds, MB sent and peak MB of the rank with most."""
    from mmlab.cluster.pool import RankPool

    rows = []
    with RankPool(max(ranks)) as pool:
        for world in ranks:
            found = pool.run("context:measure_rank", lengths, rounds, ranks=world, timeout=600)
            for mine in zip(*found, strict=True):
                rows.append(
                    {
                        "ranks": world, "variant": mine[0]["variant"], "tokens": mine[0]["tokens"],
                        "ms": 1e3 * max(statistics.median(row["seconds"]) for row in mine),
                        "sent_mb": max(row["sent"] for row in mine) / 1e6,
                        "peak_mb": max(row["peak"] for row in mine) / 1e6,
                    }
                )  # fmt: skip
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Rows as text; time and peak also as shares of one rank's plain attention, where that was measured."""
    plain = {row["tokens"]: row for row in rows if row["variant"] == "plain"}
    lines = [
        f"{'tokens':>7} {'ranks':>5} {'variant':<20}{'ms':>9}{'x plain':>9}{'peak MB':>9}{'x plain':>9}{'sent MB':>9}"
    ]
    for row in sorted(rows, key=lambda r: (r["tokens"], r["ranks"])):
        base = plain.get(row["tokens"])
        shares = [f"{row[key] / base[key]:.2f}" if base else "" for key in ("ms", "peak_mb")]
        lines.append(
            f"{row['tokens']:>7} {row['ranks']:>5} {row['variant']:<20}{row['ms']:>9.1f}{shares[0]:>9}"
            f"{row['peak_mb']:>9.2f}{shares[1]:>9}{row['sent_mb']:>9.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sys.path.insert(0, str(Path(__file__).parent))  # where the ranks find the functions
    rows = measure(args.ranks, args.tokens, args.rounds)
    load = os.getloadavg()[0]
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, load {load:.1f}; {HEADS} heads of {WIDTH}, {KV_HEADS} for keys"
    )
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
