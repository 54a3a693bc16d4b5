"""`mmlab bench link`: what each compressor gains on a slow link between two hosts, which are two network namespaces."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from mmlab.cluster.netns import DEVICE, Shape, refuse_elsewhere, reshape, two_hosts
from mmlab.cluster.pool import RankPool, borrowed
from mmlab.errors import MmlabError
from mmlab.plan import Layout, Plan, check_platform
from mmlab.plan.compression import COMPRESSORS, GROUPS
from mmlab.plan.schema import MODULES
from mmlab.plan.sizes import rank_share

SETTINGS = {"topk": "ratio", "powersgd": "rank"}
"""What a number behind a compressor's name sets: topk:0.05, powersgd:2."""
ALONE = 0.25
"""Share of a case's seconds for which steps run without summing gradients, on a link without limit, before all cases
and once more after them: what a step takes apart from that."""
PATIENCE = 300.0
"""Seconds beyond the measured ones that a case may take, apart from those of its bits: building, and STEPS."""
STEPS = 5
"""Steps of every case, however slow: `train.bench.WARM_UP` and `train.bench.LEAST`. At 100 kbit/s the laptop plan's 5.2
MB of gradients take 420 s a step."""
SENT = 16
"""Bytes that a rank sends in a step for a parameter that trains, at most: top-k's 8, to the owner and from there on."""


def split(layout: Layout) -> list[int]:
    """The host, 0 or 1, of each rank, as a cluster of two would have them.

    Where `cluster.ranks_per_node` makes several nodes, the first half of the nodes is the first host. Else replicas of
    the language model are dealt out whole, the first half of them to the first host: what computes one sample (tensor,
    context and pipeline groups, and an encoder merged with them) stays together, and gradients cross the link. An
    encoder group of its own is dealt out the same way, since its gradients are reduced over it; its image tokens then
    cross the link where their sample is trained on the other host, as they do in a cluster.
    """
    nodes = len(layout.nodes)
    if nodes > 1:
        return [place.node * 2 // nodes for place in layout.places]
    dp, encoders = layout.plan.parallel.dp, layout.first
    return [p.vision * 2 // encoders if p.role == "vision" else p.dp * 2 // dp for p in layout.places]


def refuse_useless(plan: Plan, hosts: Sequence[int]) -> None:
    """MmlabError when no gradients are reduced between the hosts."""
    layout = plan.layout()
    if plan.world_size == 1:
        raise MmlabError("the plan has one rank, so nothing is sent between hosts; try parallel.dp=2")
    trained = [m for m in MODULES if not getattr(plan.train, m).frozen]
    if any(len({hosts[rank] for rank in group}) > 1 for m in trained for group in layout.copies(m)):
        return
    where = "as cluster.ranks_per_node deals its ranks out" if len(layout.nodes) > 1 else "with one replica a module"
    raise MmlabError(
        f"no gradients of this plan are reduced between the two hosts, {where}; try parallel.dp=2 (replicas go to "
        "different hosts), or parallel.vision_dp=2"
    )


def refuse_unmeasured(plan: Plan) -> None:
    """MmlabError when what is on the clock would not be what the table says."""
    p = plan.parallel
    if p.engine != "native":
        raise MmlabError(
            "DeepSpeed sums gradients itself, so a step without summing them cannot be measured; try "
            "parallel.engine=native parallel.sharding=none offload.mode=none"
        )
    if p.sharding in ("zero2", "zero3"):
        raise MmlabError(
            f"{p.sharding} sums gradients inside backward, beside gathers of weights: a step without summing them "
            "cannot be measured, nor what they send by themselves; try parallel.sharding=none"
        )
    if plan.train.optimizer == "onebit_adam":
        raise MmlabError(
            f"onebit_adam reduces without compression up to step {plan.train.freeze_step}, so every compressor would "
            "be measured as dense; try train.optimizer=adamw, which sends as many bytes with each compressor"
        )


def cases(plan: Plan, compressors: Sequence[str]) -> list[tuple[str, Plan]]:
    """(name, plan) of each measurement, dense first: "none", "int8", "powersgd:2" for every group of modules with more
    than one holder, from the first step on and never reduced a second time to measure errors. MmlabError on a name or a
    number that is none."""
    base = plan.with_(
        {"cluster.device": "cpu", "cluster.collectives": "gloo", "communication.measure_every": 0},
        {f"communication.{group}.warmup_steps": 0 for group in GROUPS},
    )
    layout = base.layout()
    groups = [group for group in GROUPS if any(len(ranks) > 1 for ranks in layout.copies(group))]
    found = []
    for name in dict.fromkeys(("none", *compressors)):
        compressor, _, number = name.partition(":")
        if compressor not in COMPRESSORS or (number and compressor not in SETTINGS):
            raise MmlabError(
                f"--compressors {name}: not a compressor; there are {', '.join(COMPRESSORS)}, and with a number "
                "topk:0.05 (its ratio) and powersgd:2 (its rank)"
            )
        changes = [f"communication.{group}.compressor={compressor}" for group in groups]
        if number:
            changes += [f"communication.{group}.{SETTINGS[compressor]}={number}" for group in groups]
        found.append((name, base.with_(*changes)))
    return found


def bench_link(
    plan: Plan,
    shape: Shape,
    compressors: Sequence[str],
    seconds: float,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Train the plan once with each compressor, for as many seconds, on two hosts that a link of this shape joins.

    The plan's ranks run on CPU over gloo (the hosts share this machine's memory, which two hosts do not). "alone":
    seconds of a step whose gradients are not summed, on a link without limit. "rows", for each compressor:
    "steps_per_s" (median), "handed" bytes of gradients that a rank hands to communication in a step (the rank with
    most), "sent" bytes of all kinds that a host sends over the link in a step (the one with more), "ratio" of steps/s
    to dense, "predicted" that by bytes alone: a step takes what it takes alone and the time of the sent bits.
    "equal_steps" and "equal_time": (steps, loss) after as many steps and after as many seconds as all have; the loss is
    the mean of the last tenth of these steps. "problem" in a row where the plan does not go with the compressor.
    MmlabError on what is at fault; RankError when a rank fails.
    """
    if not math.isfinite(seconds):
        raise MmlabError(f"--seconds {seconds}: must be a number of seconds, such as 20")
    check_platform()
    hosts = split(plan.layout())
    rows = [({"compressor": name}, case) for name, case in cases(plan, compressors)]
    for row, case in rows:
        problems = case.check()
        if row["compressor"] == "none":
            problems.raise_if_any()
        elif problems:
            row["problem"] = problems[0].message
    refuse_unmeasured(plan)
    refuse_useless(plan, hosts)
    refuse_elsewhere()
    measured = [(row, case) for row, case in rows if "problem" not in row]
    with two_hosts() as pair:
        threads = plan.cluster.threads or 1
        with RankPool(plan.world_size, threads, [pair[host] for host in hosts]) as pool:
            free: list[float] = []
            rest = 0.0
            for number, (row, case) in enumerate([measured[0], *measured, measured[0]]):
                limited = 0 < number <= len(measured)
                reshape(pair, shape if limited else None)
                say(f"{row['compressor']}, {seconds:g} s" if limited else "gradients not summed")
                if limited:
                    row |= _run(pool, case, seconds, hosts, limit=time_limit(case, hosts, seconds, rest, shape))
                else:
                    found = _run(pool, case, ALONE * seconds, hosts, limit=seconds + PATIENCE, exchange=False)
                    free, rest = free + found["seconds"], found["sent"]
            alone = statistics.median(free)
    _compare([row for row, _ in measured], alone, shape)
    return {"alone": alone, "rate": shape.rate, "delay": shape.delay, "hosts": hosts, "rows": [row for row, _ in rows]}


def time_limit(case: Plan, hosts: Sequence[int], seconds: float, rest: float, shape: Shape) -> float:
    """Seconds after which a case is given up; `rest`: bytes that a host sends in a step apart from gradients."""
    layout = case.layout()
    trained = [0, 0]
    for host, place in zip(hosts, layout.places, strict=True):
        trained[host] += rank_share(case, layout, place).trained
    return seconds + PATIENCE + STEPS * expected(0.0, SENT * max(trained) + rest, shape)


def _run(
    pool: RankPool, case: Plan, seconds: float, hosts: Sequence[int], *, limit: float, exchange: bool = True
) -> dict[str, Any]:
    """One measurement: a step is as long as on the slowest rank."""
    with borrowed(case.world_size, pool) as own:
        found = own.run("mmlab.train.bench:run_for", case.dumps(), seconds, DEVICE, exchange, timeout=limit)
    return {
        "seconds": [max(step) for step in zip(*(result["seconds"] for result in found), strict=True)],
        "losses": found[0]["losses"],
        "handed": max(result["handed"] for result in found),
        "sent": max(found[hosts.index(host)]["sent"] for host in (0, 1)),
    }


def _compare(rows: list[dict[str, Any]], alone: float, shape: Shape) -> None:
    """Put the cases beside dense, the first of them."""
    steps = min(len(row["losses"]) for row in rows)
    time = min(sum(row["seconds"]) for row in rows)
    for row in rows:
        row["steps_per_s"] = 1.0 / statistics.median(row["seconds"])
        row["ratio"] = row["steps_per_s"] / rows[0]["steps_per_s"]
        row["predicted"] = expected(alone, rows[0]["sent"], shape) / expected(alone, row["sent"], shape)
        row["equal_steps"] = (steps, _loss(row["losses"][:steps]))
        warm_up, within = len(row["losses"]) - len(row["seconds"]), 0.0
        reached = warm_up
        for second in row["seconds"]:
            within += second
            reached += within <= time * (1 + 1e-9)
        row["equal_time"] = (reached, _loss(row["losses"][:reached]))


def expected(alone: float, sent: float, shape: Shape) -> float:
    """Seconds of a step by bytes alone: what it takes apart from summing gradients, and the time of its bits."""
    return alone + 8 * sent / shape.rate


def _loss(losses: list[float]) -> float:
    return statistics.fmean(losses[-max(1, len(losses) // 10) :])
