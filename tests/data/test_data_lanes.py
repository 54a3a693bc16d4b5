import json
from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mmlab.data.lanes import Lanes, keyed_order
from mmlab.data.manifest import Cursors

ORDER_8 = [2, 6, 5, 3, 0, 4, 7, 1]
ITEMS_5 = [(0, 2), (1, 1), (1, 0), (0, 3), (0, 0)]
sizes = st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any)


@given(sizes, st.integers(1, 9), st.integers(0, 5), st.lists(st.integers(1, 17), min_size=1, max_size=12))
def test_each_epoch_has_every_sample_once(sizes, lanes, seed, takes):
    order = Lanes(sizes, lanes, seed)
    everything = Counter((shard, i) for shard, size in enumerate(sizes) for i in range(size))
    total, cursors, items = sum(sizes), order.start(), []
    while len(items) < 2 * total:
        new, cursors = order.take(cursors, takes[len(items) % len(takes)])
        items += new
    for epoch in (0, 1):
        piece = items[epoch * total : (epoch + 1) * total]
        assert Counter((item.shard, item.index) for item in piece) == everything
        assert {item.epoch for item in piece} == {epoch}
        assert all(0 <= item.lane < lanes for item in piece)


@given(sizes, st.integers(1, 9), st.integers(0, 5), st.integers(0, 100), st.integers(1, 30))
def test_cursors_resume_exactly_after_json(sizes, lanes, seed, before, after):
    order = Lanes(sizes, lanes, seed)
    whole, end = order.take(order.start(), before + after)
    _, cursors = order.take(order.start(), before)
    cursors = Cursors.from_json(json.loads(json.dumps(cursors.to_json())))
    rest, resumed_end = Lanes(sizes, lanes, seed).take(cursors, after)
    assert rest == whole[before:]
    assert resumed_end == end


@settings(max_examples=20)
@given(sizes, st.integers(1, 9), st.integers(0, 5))
def test_take_is_pure(sizes, lanes, seed):
    order = Lanes(sizes, lanes, seed)
    first = order.take(order.start(), 3)
    order.take(order.start(), 3 * sum(sizes))  # caches of other epochs make no difference
    assert order.take(order.start(), 3) == first


def test_seed_and_epoch_change_the_order_and_lanes_take_turns():
    order = Lanes([50, 50], 4, seed=1)
    items, _ = order.take(order.start(), 200)
    assert [item.lane for item in items[:8]] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [(i.shard, i.index) for i in items[:100]] != [(i.shard, i.index) for i in items[100:]]
    assert Lanes([50, 50], 4, seed=2).take(order.start(), 100)[0] != items[:100]
    assert {item.shard for item in items[:8]} == {0, 1}


def test_the_order_is_the_same_on_every_machine():
    # Written down once: a change of this order breaks every resumed run, so it has to be meant.
    assert keyed_order(8, 0, 0).tolist() == ORDER_8
    items, _ = Lanes([5, 4], 2, seed=0).take(Cursors(0, (0, 0)), 5)
    assert [(item.shard, item.index) for item in items] == ITEMS_5


def test_keyed_order_is_even():
    first = Counter(int(keyed_order(10, key)[0]) for key in range(2000))
    assert min(first.values()) > 130  # 200 expected, standard deviation 13
    assert sorted(keyed_order(1000, 3).tolist()) == list(range(1000))
    assert np.corrcoef(keyed_order(1000, 1), np.arange(1000))[0, 1] < 0.1
