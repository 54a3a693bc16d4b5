"""Equal work for all: how samples are dealt to bins by their tokens and tiles.

Pure functions of what the index knows, so that every rank computes the same.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

_PAIRS = 4_000_000
"""Pairs that exchanges look at, at most: 0.1 s; what largest first leaves in larger windows is under 2 % anyway."""
_NOTHING = 1e-12
"""Gain in squared shares below which an exchange is rounding."""


class Work(NamedTuple):
    """What a sample costs: tokens for the language model, tiles for the encoder."""

    tokens: int
    tiles: int


def deal(
    work: Sequence[Work], bins: int, kinds: Sequence[Hashable] = (), room: Sequence[Mapping[Any, int]] = ()
) -> list[list[int]]:
    """The samples of each of `bins` bins, in their order; each bin gets one at least where there are enough.

    Largest first (Graham 1969), each into the bin that has least of what the sample needs: least dot product of its
    load with the sample, both as shares of all work (which adds least to the squared loads); then exchanges between
    the fullest or the emptiest bin and others as long as they make the squared loads less. With `room`, bin b has
    `room[b][kind]` samples of a kind.
    """
    shares = np.array(work, dtype=np.float64).reshape(-1, 2)
    shares /= np.maximum(shares.sum(axis=0), 1)
    codes = {kind: code for code, kind in enumerate(dict.fromkeys(kinds))}
    of = np.array([codes[kind] for kind in kinds], dtype=np.int64)
    left = np.array([[r.get(kind, 0) for kind in codes] for r in room], dtype=np.int64)
    loads, bin_of = np.zeros((bins, 2)), np.zeros(len(work), dtype=np.int64)
    for sample in np.argsort(-shares.sum(axis=1), kind="stable").tolist():
        cost = loads[:, 0] * shares[sample, 0] + loads[:, 1] * shares[sample, 1]
        if room:
            cost[left[:, of[sample]] == 0] = np.inf
        into = int(cost.argmin())
        if room:
            left[into, of[sample]] -= 1
        loads[into] += shares[sample]
        bin_of[sample] = into
    if room:
        _exchange(shares, bin_of, loads, of)
    else:  # an empty place in each bin: what is exchanged with it moves
        shares, bin_of = np.concatenate([shares, np.zeros((bins, 2))]), np.concatenate([bin_of, np.arange(bins)])
        _exchange(shares, bin_of, loads, np.zeros(len(shares), dtype=np.int64))
    found: list[list[int]] = [[] for _ in range(bins)]
    for sample, into in enumerate(bin_of[: len(work)].tolist()):
        found[into].append(sample)
    return found


def _exchange(shares: np.ndarray, bin_of: np.ndarray, loads: np.ndarray, kinds: np.ndarray) -> None:
    """Exchange samples of one kind between bins, the best pair each time, in place; `loads` [bins, 2] follow."""
    bins, n = len(loads), len(shares)
    most = min(4 * n, _PAIRS * bins // n**2)
    for _ in range(most):
        filled = loads.sum(axis=1)
        if not any(_best_exchange(shares, bin_of, loads, kinds, int(at)) for at in (filled.argmax(), filled.argmin())):
            return


def _best_exchange(shares: np.ndarray, bin_of: np.ndarray, loads: np.ndarray, kinds: np.ndarray, at: int) -> bool:
    """Make the exchange of one bin with another that makes the squared loads least; whether there is one."""
    mine, others = np.flatnonzero(bin_of == at), np.flatnonzero(bin_of != at)
    if not len(mine) or not len(others):
        return False
    given = shares[mine][:, None] - shares[others][None]  # what the bin would lose: [mine, others, 2]
    gain = given * (loads[at] - loads[bin_of[others]] - given)
    better = np.where(kinds[mine][:, None] == kinds[others], gain[..., 0] + gain[..., 1], 0.0)
    i, j = np.unravel_index(int(better.argmax()), better.shape)
    if better[i, j] <= _NOTHING:
        return False
    one, two = mine[i], others[j]
    other, moved = bin_of[two], given[i, j]
    loads[at] -= moved
    loads[other] += moved
    bin_of[one], bin_of[two] = other, at
    return True


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
