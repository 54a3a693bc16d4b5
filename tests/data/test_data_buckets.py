"""Equal work: dealing is a permutation within windows, alike for every layout, and resumes exactly."""

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from data_helpers import manifest_of, picture, small_plan, write_tar
from hypothesis import given, settings
from hypothesis import strategies as st

from mmlab.data.balance import balance
from mmlab.data.buckets import Work, deal, deal_within
from mmlab.data.manifest import ManifestSample, Split, StepManifest
from mmlab.data.order import Order, Position
from mmlab.data.pipeline import DataSource
from mmlab.data.tiling import Grid
from mmlab.data.windows import Buckets
from mmlab.errors import DataError
from mmlab.plan import Plan

works = st.lists(st.builds(Work, st.integers(1, 2000), st.integers(0, 13)), min_size=1, max_size=60)


@given(works, st.integers(1, 8))
def test_every_sample_is_dealt_once_and_no_bin_is_empty_or_far_from_the_mean(work, bins):
    parts = deal(work, bins)
    assert sorted(i for part in parts for i in part) == list(range(len(work)))
    assert all(part == sorted(part) for part in parts)
    assert all(parts) or len(work) < bins
    alone = deal([Work(w.tokens, 0) for w in work], bins)
    loads = [sum(work[i].tokens for i in part) for part in alone]
    assert deal(work, bins) == parts  # nothing but what it is given decides
    assert max(loads) - min(loads) <= max(w.tokens for w in work)  # Graham's bound


@given(works, st.integers(1, 8), st.integers(1, 4000))
def test_a_budget_is_kept_where_it_can_be(work, bins, budget):
    work = work * bins
    parts = deal_within(work, bins, budget)
    assert sorted(i for part in parts for i in part) == list(range(len(work)))
    assert all(parts)
    most = max(sum(work[i].tokens for i in part) for part in parts)
    assert most <= max(budget, max(sum(work[i].tokens for i in part) for part in deal(work, bins)))
    mean, largest = sum(w.tokens for w in work) / bins, max(w.tokens for w in work)
    if budget >= mean + largest:
        assert most <= budget


def test_a_budget_is_kept_where_equal_work_would_not():
    """Tiles pull samples apart whose tokens would fit: 5 and 3 tokens are evener in both than 4 and 4."""
    work = [Work(2, 4), Work(1, 2), Work(1, 3), Work(4, 3)]
    assert max(sum(work[i].tokens for i in part) for part in deal(work, 2)) == 5
    parts = deal_within(work, 2, 4)
    assert [sum(work[i].tokens for i in part) for part in parts] == [4, 4]
    assert deal_within(work, 2, 3) == deal(work, 2)  # none has room for it all: the even one stands


def made_up(item):
    """A sample of a length and tiles that its place alone decides."""
    rng = np.random.default_rng([item.shard, item.index])
    tiles = int(rng.integers(0, 7))
    length = 4 * tiles + int(rng.lognormal(3, 1)) + 1
    grids = (Grid(tiles),) * (tiles > 0)
    return ManifestSample(f"{item.shard}/{item.index}", item.shard, item.index, item.epoch, item.lane, length, 1, grids)


@st.composite
def bucketed(draw):
    """(order, samples a step, window)"""
    sources = draw(st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=2), min_size=1, max_size=3))
    sizes = [size for source in sources for size in source]
    order = Order(sizes, draw(st.integers(1, 3)), 1, [len(s) for s in sources], (), draw(st.integers(0, 9)))
    batch = draw(st.integers(1, 8))
    return order, batch, batch * draw(st.integers(1, 6))


def steps_of(order, batch, window, count, position=None):
    buckets, position, found = Buckets(order, batch, window, made_up), position or order.start(), []
    for _ in range(count):
        taken, position = buckets.take(position)
        found.append(taken)
    return found, position


@settings(max_examples=40)
@given(bucketed(), st.integers(0, 9))
def test_buckets_reorder_within_their_window_only_and_resume_anywhere(arguments, stop):
    order, batch, window = arguments
    count = 2 * window // batch
    found, end = steps_of(order, batch, window, count)
    plain, after = steps_of(order, batch, 0, count)
    for first in range(0, count, window // batch):
        here = [s for b in found[first : first + window // batch] for s in b.samples]
        assert Counter(here) == Counter(s for b in plain[first : first + window // batch] for s in b.samples)
    assert [b.unbucketed for b in found] == [b.samples for b in plain]
    assert end == after  # at a window's end it stands where the order stands
    for with_, without in zip(found, plain, strict=True):
        shares = [Counter(order.source_of(s.shard) for s in b.samples) for b in (with_, without)]
        assert shares[0] == shares[1]
    head, position = steps_of(order, batch, window, min(stop, count))
    position = Position.from_json(json.loads(json.dumps(position.to_json())))
    assert head + steps_of(order, batch, window, count - len(head), position)[0] == found


splits = st.builds(Split, st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), together=st.integers(1, 4))


@given(splits, st.lists(st.integers(0, 9), min_size=16, max_size=40))
def test_an_even_split_gives_every_position_one_place_and_every_image_one_owner(split, tiles):
    manifest = manifest_of(tiles, replace(split, even=True))
    places = {(d, m): manifest.microbatch(d, m) for d in range(split.dp) for m in range(split.microbatches)}
    assert sorted(i for part in places.values() for i in part) == list(range(len(tiles)))
    assert all(places.values())
    assert all(manifest.microbatch_of(i) == place for place, part in places.items() for i in part)
    for m in range(split.microbatches):
        owned = [i for owner in range(split.owners) for i in manifest.owned(owner, m)]
        assert sorted(owned) == sorted(i for d in range(split.dp) for i in places[d, m] if tiles[i])
        for owner in range(split.owners):  # rows of a replica lie together, as an encoder sends them
            replicas = [manifest.microbatch_of(i)[0] for i in manifest.owned(owner, m)]
            assert replicas == sorted(replicas)
    assert sorted(i for o in range(split.owners) for i in manifest.owned(o)) == [i for i, n in enumerate(tiles) if n]


def test_balance_tells_of_both_sides_before_and_after():
    split = Split(dp=2, microbatches=2, owners=2, even=True, budget=25)
    samples = manifest_of([4, 4, 0, 0, 4, 4, 0, 0], split).samples
    lengths = (30, 30, 5, 5, 10, 10, 5, 5)
    samples = tuple(replace(s, length=length) for s, length in zip(samples, lengths, strict=True))
    told = balance(StepManifest(1, samples, split, unbucketed=samples))
    assert told == {
        "tokens": 1.2, "images": 1.0, "over": 5,
        "unbucketed": {"tokens": 2.4, "images": 1.0, "total": 100},
    }  # fmt: skip
    assert balance(manifest_of([0, 0], Split(dp=2)))["images"] is None


# -- through a plan


@pytest.fixture
def skewed(tmp_path):
    """60 samples: every third is text alone, few are long."""
    for shard in range(2):
        files = []
        for number in range(30 * shard, 30 * shard + 30):
            words = 40 if number % 10 == 9 else 2 + number % 3
            files.append((f"{number:03d}.txt", b"word " * words))
            if number % 3:
                size = [(24, 16), (64, 16), (16, 96)][number % 4 % 3]
                files.append((f"{number:03d}.png", picture(size=size)))
        write_tar(tmp_path / f"train-{shard:06d}.tar", files)
    return tmp_path


def plan_of(folder, *changes):
    plan = Plan.model_validate(small_plan(folder, data={"global_batch": 6, "seq_len": 96}).model_dump())
    plan = plan.with_({"data.max_tiles": 4, "model.language.max_positions": 512}, *changes)
    assert not plan.check()
    return plan


def manifests(source, count, position=None, split=None):
    position, found = position or source.start(), []
    for step in range(1, count + 1):
        manifest, position = source.manifest(step, position, split)
        found.append(manifest)
    return found, position


def test_steps_of_a_window_have_equal_work_for_every_layout(skewed):
    plain, even = DataSource(plan_of(skewed)), DataSource(plan_of(skewed, "data.bucket_window=30"))
    before, _ = manifests(plain, 10)
    after, _ = manifests(even, 10)
    assert {m.samples for m in after} != {m.samples for m in before}
    for kind in ("tokens", "tiles"):
        spread = [np.std([getattr(m, kind) for m in found]) for found in (before, after)]
        assert spread[1] < spread[0] / 2
    for layout in ("parallel.dp=3", "parallel.microbatches=2", "parallel.vision_dp=2"):
        other = DataSource(plan_of(skewed, "data.bucket_window=30", layout))
        found, _ = manifests(other, 10)
        assert [m.samples for m in found] == [m.samples for m in after]
        other.close()
    plain.close()
    even.close()


def test_inside_a_window_only_what_its_samples_depend_on_must_stay(skewed):
    windows = ("data.bucket_window=30", "data.shuffle_window=8")
    source = DataSource(plan_of(skewed, *windows))
    whole, _ = manifests(source, 8)
    _, position = manifests(source, 3)
    position = Position.from_json(json.loads(json.dumps(position.to_json())))
    layout = DataSource(plan_of(skewed, *windows, "parallel.dp=3", "data.workers=1"))
    rest, end = manifests(layout, 5, position)
    assert [m.samples for m in rest] == [m.samples for m in whole[3:]]
    refusals = {
        "data.bucket_window=60": r"data\.bucket_window = 60: the saved position is 18 samples into a bucket window "
        r"made with 30\. Set data\.bucket_window=30",
        "data.seq_len=90": r"data\.seq_len = 90",
        "data.thumbnail=false": r"Set data\.thumbnail=true",
        "data.global_batch=3": r"data\.global_batch = 3",
    }
    for change, message in refusals.items():
        other = DataSource(plan_of(skewed, *windows, change))
        with pytest.raises(DataError, match=message):
            other.manifest(4, position)
        other.close()
    _, edge = manifests(source, 5)
    other = DataSource(plan_of(skewed, *windows, "data.seq_len=90", "data.bucket_window=60"))
    with pytest.raises(DataError, match=r"data\.shuffle_window = 0: the saved position is 6 samples"):
        DataSource(plan_of(skewed)).manifest(6, edge)  # 30 samples are 6 into a shuffle window
    assert other.manifest(6, edge)[0].step == 6
    assert (end.grouped, edge.grouped) == (18, 0)
    for each in (source, layout, other):
        each.close()


def test_other_weights_are_refused_inside_a_shuffle_window(skewed, tmp_path):
    sources = {"data.sources": [str(skewed), str(skewed)], "data.weights": [3, 1], "data.shuffle_window": 8}
    source, other = (DataSource(plan_of(skewed, sources, change)) for change in ({}, {"data.weights": [1, 1]}))
    _, inside = manifests(source, 1)
    with pytest.raises(DataError, match=r"data\.weights = \[1\.0, 1\.0\]: .* Set data\.weights=\[3\.0, 1\.0\]"):
        other.manifest(2, Position.from_json(json.loads(json.dumps(inside.to_json()))))
    _, edge = manifests(source, 4)
    assert other.manifest(5, edge)[0].step == 5  # 24 samples: between two windows
    source.close()
    other.close()


def test_a_budget_deals_within_a_step_and_what_cannot_be_is_refused(skewed):
    longest = 96
    plan = plan_of(skewed, "data.global_batch=12", "parallel.microbatches=4", f"data.token_budget={longest}")
    source = DataSource(plan)
    found, _ = manifests(source, 10)
    without = DataSource(plan.with_("data.token_budget=0"))
    plain, _ = manifests(without, 10)
    assert [m.samples for m in found] == [m.samples for m in plain]  # no window: samples stay in their step
    most = [[max(sum(m.samples[i].length for i in m.microbatch(0, k)) for k in range(4)) for m in ms]
            for ms in (plain, found)]  # fmt: skip
    assert max(most[0]) > longest >= max(most[1])
    with pytest.raises(DataError, match=r'data\.token_budget = 30: sample "0.9" of .*train-0\S+ alone has \d+ tokens'):
        DataSource(plan.with_("data.token_budget=30"))
    tight = DataSource(plan.with_("parallel.microbatches=1"))  # what cannot be kept is told, step by step
    (manifest, *_), _ = manifests(tight, 1)
    assert balance(manifest)["over"] == manifest.tokens - longest
    tight.close()
    source.close()
    without.close()


@pytest.mark.parametrize("windows", [(), ("data.shuffle_window=10",), ("data.bucket_window=30",)])
def test_every_step_has_its_share_of_text(skewed, windows):
    source = DataSource(plan_of(skewed, "data.text_share=0.4", *windows))
    found, position = manifests(source, 25)
    texts = [sum(not sample.tiles for sample in manifest.samples) for manifest in found]
    assert set(texts) <= {2, 3}  # 2.4 of 6
    assert sum(texts) == 60
    keys = Counter(sample.key for manifest in found for sample in manifest.samples)
    assert len(keys) == 60  # 40 pictures twice (80 of 90 drawn), 20 texts three times
    assert {keys[f"train-{n // 30:06d}.tar/{n:03d}"] for n in range(0, 60, 3)} == {3}
    assert all(
        source.turns(s)[0].prompt.count("<image>") == bool(s.tiles) and len(source.pictures(s)) == len(s.grids)
        for s in found[0].samples
    )
    plain = DataSource(plan_of(skewed))
    with pytest.raises(DataError, match=r"is of 2 sources, not of 1 \(with data\.text_share, text and pictures"):
        plain.manifest(26, replace(position, offset=0, grouped=0, settings=()))
    plain.close()
    source.close()


def test_a_share_of_what_is_not_there_is_refused(tmp_path):
    write_tar(tmp_path / "images" / "train-000000.tar", [("a.png", picture()), ("a.txt", b"one")])
    write_tar(tmp_path / "texts" / "train-000000.tar", [("a.txt", b"one")])
    with pytest.raises(DataError, match=r"data\.text_share = 0\.2: the data have no text-only samples"):
        DataSource(plan_of(tmp_path / "images", "data.text_share=0.2"))
    with pytest.raises(DataError, match=r"data\.text_share = 0\.2: the data have no samples with images"):
        DataSource(plan_of(tmp_path / "texts", "data.text_share=0.2"))


def test_replicas_have_their_share_of_text_too(skewed):
    source = DataSource(plan_of(skewed, "data.text_share=0.5", "data.global_batch=8", "parallel.dp=2"))
    for manifest in manifests(source, 10)[0]:
        for dp in (0, 1):
            assert sum(not manifest.samples[i].tiles for i in manifest.microbatch(dp, 0)) == 2
    source.close()
