"""Equal work for all: how samples are dealt to bins by their tokens and tiles.

Pure functions of what the index knows, so that every rank computes the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np


class Work(NamedTuple):
    """What a sample costs: tokens for the language model, tiles for the encoder."""

    tokens: int
    tiles: int


def deal(
    work: Sequence[Work], bins: int, kinds: Sequence[Hashable] = (), room: Sequence[Mapping[Any, int]] = ()
) -> list[list[int]]:
    """The samples of each of `bins` bins, in their order; each bin gets one at least where there are enough.

    Largest first (Graham 1969), each into the bin that has least of what the sample needs: least dot product of its
    load with the sample, both as shares of all work (which adds least to the squared loads). With `room`, bin b takes
    `room[b][kind]` samples of a kind.
    """
    loads = np.zeros((bins, 2))
    shares = np.array(work, dtype=np.float64).reshape(-1, 2)
    shares /= np.maximum(shares.sum(axis=0), 1)
    full = {kind: np.array([r.get(kind, 0) == 0 for r in room]) for kind in set(kinds)}
    left = [Counter(r) for r in room]
    found: list[list[int]] = [[] for _ in range(bins)]
    for sample in np.argsort(-shares.sum(axis=1), kind="stable").tolist():
        tokens, tiles = shares[sample]
        cost = loads[:, 0] * tokens + loads[:, 1] * tiles
        if room:
            cost[full[kinds[sample]]] = np.inf
        into = int(cost.argmin())
        loads[into] += shares[sample]
        found[into].append(sample)
        if room:
            left[into][kinds[sample]] -= 1
            full[kinds[sample]][into] = left[into][kinds[sample]] == 0
    return [sorted(samples) for samples in found]


def deal_within(work: Sequence[Work], bins: int, budget: int) -> list[list[int]]:
    """As `deal`, with at most `budget` tokens in each bin where that can be found; 0 means no limit.

    Where the even deal is over it, largest first into the fullest bin that still has room (best fit decreasing:
    Johnson 1974); where that needs more bins too, the even deal stands, which is over it by little.
    """
    even = deal(work, bins)
    if not budget or max(sum(work[i].tokens for i in part) for part in even) <= budget:
        return even
    packed: list[list[int]] = [[] for _ in range(bins)]
    loads = [0] * bins
    for sample in sorted(range(len(work)), key=lambda i: (-work[i].tokens, i)):
        fitting = [b for b in range(bins) if loads[b] + work[sample].tokens <= budget]
        if not fitting:
            return even
        into = max(fitting, key=lambda b: (loads[b], -b))
        loads[into] += work[sample].tokens
        packed[into].append(sample)
    return [sorted(part) for part in packed] if all(packed) else even
