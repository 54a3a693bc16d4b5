"""In which order a rank runs its share of a step's pipeline: one pure function for each schedule.

Every function gives the forward and backward passes of one rank, from its index in the pipeline, the length `pp` of the
pipeline and the number `m` of microbatches. A pass is (kind, microbatch, chunk), where the chunk says which of the
rank's model chunks runs. What is sent and received follows from the passes (`mmlab.plan.schedule`).

Zero-bubble schedules split backward: `backward_input` gives the gradient that the stage before waits for,
`backward_weight` those of the linear layers, which nobody waits for, so that it can fill what would be a bubble.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

PassKind = Literal["forward", "backward", "backward_input", "backward_weight"]
_KINDS: dict[str, PassKind] = {"F": "forward", "B": "backward_input", "W": "backward_weight"}


class Pass(NamedTuple):
    """One pass of a microbatch through one model chunk."""

    kind: PassKind
    microbatch: int
    chunk: int = 0


def gpipe(m: int) -> list[Pass]:
    """All forwards, then all backwards (Huang et al. 2019); a stage holds all `m` microbatches."""
    return [Pass("forward", i) for i in range(m)] + [Pass("backward", i) for i in range(m)]


def one_f_one_b(stage: int, pp: int, m: int) -> list[Pass]:
    """Backward as early as it can be (Narayanan et al. 2021, section 2.2): stage s holds pp - s at most."""
    warmup = min(pp - stage - 1, m)
    order = [Pass("forward", i) for i in range(warmup)]
    for i in range(m - warmup):
        order += [Pass("forward", warmup + i), Pass("backward", i)]
    return order + [Pass("backward", i) for i in range(m - warmup, m)]


def interleaved(rank: int, pp: int, m: int, chunks: int) -> list[Pass]:
    """1F1B over `chunks` model chunks a rank, pp microbatches at a time (Narayanan et al. 2021, section 2.2).

    Rank r holds the virtual stages r, pp + r, 2 pp + r, ...; `m` must be a multiple of pp. The bubble is 1/chunks of
    1F1B's, for chunks times as many transfers. A rank holds at most 2 (pp - r - 1) + (chunks - 1) pp + 1 chunk
    activations (as many as 1F1B and a share of (pp - 1) / (pp chunks) more on the first rank).
    """
    total = m * chunks
    warmup = min(total, 2 * (pp - rank - 1) + (chunks - 1) * pp)

    def at(kind: PassKind, number: int) -> Pass:
        group, within = divmod(number, pp * chunks)
        chunk = within // pp
        return Pass(kind, group * pp + within % pp, chunk if kind == "forward" else chunks - 1 - chunk)

    order = [at("forward", number) for number in range(warmup)]
    for number in range(total - warmup):
        order += [at("forward", warmup + number), at("backward", number)]
    return order + [at("backward", number) for number in range(total - warmup, total)]


def zero_bubble_h1(stage: int, pp: int, m: int) -> list[Pass]:
    """1F1B with the weight half of backward put off by `stage` microbatches (Qi et al. 2023, ZB-H1, section 2.3).

    With equal costs the bubble is a third of 1F1B's ((pp - 1) times a pass instead of three). No stage holds more than
    pp microbatches, which is what 1F1B's first stage holds.
    """
    ready = min(pp - stage, m)
    order = [Pass("forward", i) for i in range(ready)]
    for i in range(m):
        order.append(Pass("backward_input", i))
        if i >= stage:  # before the next forward, so that no more than pp microbatches are ever held
            order.append(Pass("backward_weight", i - stage))
        if ready + i < m:
            order.append(Pass("forward", ready + i))
    return order + [Pass("backward_weight", i) for i in range(max(0, m - stage), m)]


def zero_bubble_v(rank: int, pp: int, m: int) -> list[Pass]:
    """Two chunks a rank in the shape of a V (Qi et al. 2023, ZB-V; Qi et al. 2024, section 3).

    Rank r holds the virtual stages r and 2 pp - 1 - r, so the first rank has both ends of the model and a microbatch's
    backward begins where its forward ended. With equal costs and m at least 2 pp - 1 nothing is idle between a rank's
    first and last pass; a rank holds at most 2 pp chunk activations, 1F1B's peak. With fewer microbatches it is the
    schedule of 2 pp - 1 with the passes of the surplus ones left out.
    """
    wanted = max(2 * pp - 1, m)
    done: dict[str, int] = {}
    order: list[Pass] = []

    def run(passes: str, times: int = 1) -> None:
        for name in passes.split() * times:
            number = done[name] = done.get(name, -1) + 1
            order.append(Pass(_KINDS[name[0]], number, int(name[1])))

    run("F0", 2 * (pp - rank) - 1)
    run("F1 F0", rank)
    run("F1 B1 W1", pp - rank)
    ahead = wanted - (2 * pp - rank - 1)  # forwards that chunk 0 still has to do; chunk 1 has wanted - pp
    run("F0 B0 W0 F1 B1 W1", ahead)
    run("B0 W0 F1 B1 W1", wanted - pp - ahead)
    run("B0 B1", rank)
    run("B0 W0", pp - rank)
    run("W1", rank)
    run("W0", rank)
    return [each for each in order if each.microbatch < m]
