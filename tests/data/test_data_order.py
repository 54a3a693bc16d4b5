"""Several sources in one order: exact shares, each source whole in its epochs, windows, positions that resume."""

import json
from collections import Counter

import pytest
from data_helpers import numbered_shards, small_plan
from hypothesis import given, settings
from hypothesis import strategies as st

from mmlab.data.lanes import Lanes
from mmlab.data.order import Order, Position
from mmlab.data.pipeline import DataSource
from mmlab.errors import DataError, PlanError
from mmlab.plan import Plan


@st.composite
def orders(draw):
    """Arguments of an order of one to four sources."""
    sources = draw(st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=3), min_size=1, max_size=4))
    weights = draw(st.lists(st.floats(0.01, 100), min_size=len(sources), max_size=len(sources)) | st.just([]))
    sizes = [size for source in sources for size in source]
    counts = [len(source) for source in sources]
    return (sizes, draw(st.integers(1, 4)), draw(st.integers(0, 3)), counts, weights, draw(st.integers(0, 9)))


@given(orders(), st.integers(1, 150))
def test_each_source_gives_its_share_and_each_of_its_epochs_is_whole(arguments, n):
    order = Order(*arguments)
    window = max(1, arguments[-1])
    n = -(-n // window) * window
    items, position = order.take(order.start(), n)
    assert position.offset == 0
    given_ = Counter(order.source_of(item.shard) for item in items)
    for number, (source, weight) in enumerate(zip(order.sources, order.weights, strict=True)):
        assert abs(given_[number] - weight / sum(order.weights) * n) < (1 if len(order.sources) < 3 else 2)
        mine = [item for item in items if order.source_of(item.shard) == number]
        plain, _ = source.take(source.start(), len(mine))
        assert Counter((i.shard - order.first[number], i.index, i.epoch) for i in mine) == Counter(
            (i.shard, i.index, i.epoch) for i in plain
        )


@given(orders(), st.integers(0, 60), st.integers(1, 40))
def test_positions_resume_exactly_after_json(arguments, before, after):
    order = Order(*arguments)
    whole, end = order.take(order.start(), before + after)
    _, position = order.take(order.start(), before)
    position = Position.from_json(json.loads(json.dumps(position.to_json())))
    again = Order.of(json.loads(json.dumps(order.identity())))
    assert again.take(position, after) == (whole[before:], end)


@settings(max_examples=20)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(1, 5), st.integers(0, 3))
def test_one_source_without_a_window_is_its_lanes(sizes, lanes, seed):
    """The order of every run of before there were several sources."""
    plain = Lanes(sizes, lanes, seed)
    items, cursors = plain.take(plain.start(), 50)
    order = Order(sizes, lanes, seed)
    found, position = order.take(order.start(), 50)
    assert found == items
    rest = order.take(Position.from_json(cursors.to_json()), 20)[0]  # as old checkpoints have it
    assert rest == order.take(position, 20)[0] == plain.take(cursors, 20)[0]


def test_a_window_moves_samples_within_itself_only():
    plain, order = Order([100], 4, 1), Order([100], 4, 1, window=10)
    sequence, shuffled = (o.take(o.start(), 200)[0] for o in (plain, order))
    for start in range(0, 200, 10):
        assert set(shuffled[start : start + 10]) == set(sequence[start : start + 10])
    moved = [shuffled[start : start + 10] != sequence[start : start + 10] for start in range(0, 200, 10)]
    assert all(moved)
    ranks = [tuple(sequence.index(item) - start for item in shuffled[start : start + 10]) for start in (0, 10, 20)]
    assert len(set(ranks)) == 3  # each window has an order of its own


@pytest.fixture
def mixed_plan(tmp_path):
    def make(*changes):
        paths = [str(numbered_shards(tmp_path / name, shards=2, samples=n)) for name, n in (("a", 6), ("b", 2))]
        plan = Plan.model_validate(small_plan(paths[0]).model_dump())
        return plan.with_({"data.sources": paths, "data.held_out": ""}, *changes)

    return make


def test_a_plan_mixes_sources(mixed_plan):
    plan = mixed_plan("data.weights=[1, 1]", "data.global_batch=4")
    assert Plan.loads(plan.dumps()) == plan
    source = DataSource(plan)
    position, keys = source.start(), []
    for step in range(1, 5):
        manifest, position = source.manifest(step, position)
        keys += [sample.key for sample in manifest.samples]
    folders = Counter("a" if "/a/" in key else "b" for key in keys)
    assert folders == {"a": 8, "b": 8}
    assert max(Counter(key for key in keys if "/b/" in key).values()) == 2  # four samples, twice each
    by_size = DataSource(mixed_plan("data.global_batch=4"))
    assert by_size.order.weights == [12, 4]
    with pytest.raises(DataError, match=r"data\.sources: the saved position is of 1 sources, not of 2"):
        source.manifest(1, Position(position.sources[:1], (0,)))
    with pytest.raises(DataError, match=r"data\.shuffle_window = 0: .* 3 samples into a window of 8"):
        source.manifest(1, Position(position.sources, (0, 0), 3, 8))
    for each in (source, by_size):
        each.close()


def test_bad_mixtures_are_refused(mixed_plan):
    problems = mixed_plan("data.weights=[1]").check()
    assert [problem.message for problem in problems] == ["1 weights for 2 sources."]
    assert not problems.apply().check()
    with pytest.raises(Exception, match=r"data.weights = .*must be a list of positive numbers"):
        mixed_plan("data.weights=[1, 0]")
    for weights in ([[1]], [True, 1], ["a", 1]):
        with pytest.raises(PlanError, match=r"data.weights"):
            mixed_plan({"data.weights": weights})
    (problem,) = mixed_plan("data.shuffle_window=100000000").check()
    assert problem.field == "data.shuffle_window"
    assert not mixed_plan("data.shuffle_window=100000000").check().apply().check()
    with pytest.raises(DataError, match=r'data\.sources = "nowhere"'):
        DataSource(mixed_plan({"data.sources": ["nowhere"]}))
