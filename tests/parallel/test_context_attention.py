"""Ring, Ulysses and image-scope attention against plain attention over the whole pack, forward and backward."""

import context_functions
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from mmlab.parallel.context.split import ContextGroup, Pack, block_owner, contiguous, grid, split, zigzag

DRAW = (Phase.explicit, Phase.reuse, Phase.generate)  # shrinking a failure would start ranks thousands of times


def case(seqlens, images=(), patches=1, mode="ring", scope="all", window=0, dtype=torch.float64):
    return {
        "seqlens": list(seqlens), "images": list(images), "patches": patches, "mode": mode, "scope": scope,
        "window": window, "dtype": dtype,
    }  # fmt: skip


def judge(results, bound=1e-12):
    for ranks in zip(*results, strict=True):
        for found in ranks:
            assert max(found[name] for name in ("out", "q", "k", "v")) <= bound, found


@st.composite
def packs(draw):
    """Sequences with images in some: (lengths, positions of image tokens, patches a side)."""
    patches = draw(st.integers(1, 4))
    lengths, images, start = [], [], 0
    for _ in range(draw(st.integers(1, 4))):
        length = 0
        for _ in range(draw(st.integers(0, 2))):
            length += draw(st.integers(0, 5))
            images += range(start + length, start + length + patches * patches)
            length += patches * patches
        length += draw(st.integers(0 if length else 1, 12))
        lengths.append(length)
        start += length
    return lengths, images, patches


@st.composite
def cases(draw):
    lengths, images, patches = draw(packs())
    mode, scope = draw(st.sampled_from([("ring", "all"), ("ring", "image"), ("ulysses", "all")]))
    return case(lengths, images, patches, mode, scope, draw(st.sampled_from([0, 0, 1, 3, 7, 40])))


@settings(max_examples=8, deadline=None, phases=DRAW, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(cases(), min_size=6, max_size=6))
def test_any_pack_on_two_ranks(pool, drawn):
    judge(pool.run(context_functions.attention, drawn, ranks=2, timeout=60))


@pytest.mark.slow
@settings(max_examples=25, deadline=None, phases=DRAW, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(cases(), min_size=6, max_size=6), st.sampled_from([2, 3, 4]))
def test_any_pack_on_more_ranks(pool, drawn, ranks):
    pool.grow(4)
    ring = [one for one in drawn if one["mode"] == "ring" or ranks == 2]  # two key/value heads do not split over more
    judge(pool.run(context_functions.attention, ring, ranks=ranks, timeout=60))


LONG = [
    case([1]), case([1, 1, 1]), case([2, 3]), case([7]), case([64]), case([33, 1, 18]),
    case([40, 40], range(4, 20), 4, scope="image"), case([40, 3], [*range(2, 18), *range(20, 36)], 4, scope="image"),
    case([600], window=50), case([300, 9, 150], window=16), case([300], range(0, 256), 16, scope="image", window=20),
    case([33, 1, 18], mode="ulysses"),
]  # fmt: skip


def test_named_packs(pool):
    """Lengths under 2 x cp, a single token, several images in a sequence, windows over long runs."""
    judge(pool.run(context_functions.attention, LONG, ranks=2, timeout=60))


@pytest.mark.slow
def test_named_packs_on_four_ranks(pool):
    pool.grow(4)
    judge(pool.run(context_functions.attention, [c for c in LONG if c["mode"] == "ring"], ranks=4, timeout=60))


def test_half_precision(pool):
    """bf16 partial attentions are merged in float32: no more error than a bf16 output has."""
    drawn = [case([40, 17], dtype=torch.bfloat16), case([40], range(4, 20), 4, scope="image", dtype=torch.bfloat16)]
    judge(pool.run(context_functions.attention, drawn, ranks=2, timeout=60), bound=1.5e-2)


def test_a_causal_ring_sends_only_what_is_seen(pool):
    """Of each remote block a reader of later tokens needs the early half, a reader of earlier ones all of it."""
    results = pool.run(context_functions.attention, [case([64])], ranks=2, timeout=60)
    assert [r[0]["rows_sent"] for r in results] == [16, 32]
    assert [r[0]["rows_skipped"] for r in results] == [16, 0]


def test_a_window_skips_blocks_that_no_query_sees(pool):
    pool.grow(4)
    results = pool.run(context_functions.attention, [case([512], window=8), case([512])], ranks=4, timeout=60)
    judge(results)
    windowed, full = (sum(r[i]["transfers"] for r in results) for i in (0, 1))
    assert windowed < full
    assert (
        sum(r[0]["rows_sent"] for r in results) == 6 * 7
    )  # the last 7 keys before each border between pieces of two ranks


def test_zigzag_pieces_cover_every_token_once_and_balance_work():
    rows = zigzag([64, 5, 1], 4)
    assert np.array_equal(np.sort(np.concatenate(rows)), np.arange(70))
    work = [int((r[r < 64] + 1).sum()) for r in rows]
    assert max(work) == min(work)


def test_contiguous_runs_differ_by_one():
    assert [len(r) for r in contiguous(10, 4)] == [2, 3, 2, 3]


def test_image_blocks_are_two_dimensional():
    assert [grid(n) for n in (1, 2, 3, 4, 6, 8)] == [(1, 1), (1, 2), (1, 3), (2, 2), (2, 3), (2, 4)]
    assert block_owner(4, 4).reshape(4, 4).tolist() == [[0, 0, 1, 1]] * 2 + [[2, 2, 3, 3]] * 2
    assert len(set(block_owner(2, 8).tolist())) == 4  # more ranks than patches: some hold none


def test_text_is_whole_on_every_rank_and_counted_once():
    pack = Pack((10, 6), np.arange(2, 6), 2)
    cut = split(pack, ContextGroup(None, 0, 2, "ring", "image"))
    assert np.array_equal(np.intersect1d(*cut.rows), np.flatnonzero(cut.shared))
    counted = np.concatenate([rows[mine] for rows, mine in zip(cut.rows, cut.counted, strict=True)])
    assert np.array_equal(np.sort(counted), np.arange(16))
