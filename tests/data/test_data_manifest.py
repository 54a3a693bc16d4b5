import json

import pytest
from data_helpers import manifest_of, numbered_shards, small_plan
from hypothesis import given
from hypothesis import strategies as st

from mmlab.data.manifest import Split
from mmlab.data.pipeline import DataSource

splits = st.builds(Split, st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), together=st.integers(1, 4))
local_splits = st.builds(
    lambda dp, m, ranks: Split(dp, m, dp * ranks, ranks, local=True),
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 4),
)


@st.composite
def manifests(draw, among=splits):
    split = draw(among)
    size = draw(st.integers(1, 4)) * split.dp * split.microbatches
    return manifest_of(draw(st.lists(st.integers(0, 6), min_size=size, max_size=size)), split)


@given(manifests())
def test_microbatches_are_the_batch_in_order(manifest):
    split = manifest.split
    parts = [manifest.microbatch(d, m) for m in range(split.microbatches) for d in range(split.dp)]
    assert [i for part in parts for i in part] == list(range(len(manifest.samples)))
    assert all(
        manifest.microbatch_of(i) == (d, m)
        for m in range(split.microbatches)
        for d in range(split.dp)
        for i in manifest.microbatch(d, m)
    )


@given(manifests())
def test_every_image_has_one_owner_and_owners_are_balanced(manifest):
    split = manifest.split
    for first in range(0, split.microbatches, split.together):
        group = range(first, min(first + split.together, split.microbatches))
        positions = [i for m in group for d in range(split.dp) for i in manifest.microbatch(d, m)]
        owned = [[i for m in group for i in manifest.owned(owner, m)] for owner in range(split.owners)]
        assert sorted(i for part in owned for i in part) == sorted(i for i in positions if manifest.samples[i].tiles)
        loads = [sum(manifest.samples[i].tiles for i in part) for part in owned]
        # Greedy balancing never leaves two owners further apart than the largest sample.
        assert max(loads) - min(loads) <= max((manifest.samples[i].tiles for i in positions), default=0)
    assert all((manifest.owner(i) == -1) == (sample.tiles == 0) for i, sample in enumerate(manifest.samples))
    assert all(manifest.owner(i) == o for o in range(split.owners) for i in manifest.owned(o))


@given(manifests(local_splits))
def test_local_owners_take_the_images_of_their_own_replica_in_equal_parts(manifest):
    split = manifest.split
    for d, m in ((d, m) for d in range(split.dp) for m in range(split.microbatches)):
        positions = [i for i in manifest.microbatch(d, m) if manifest.samples[i].tiles]
        assert all(manifest.owner(i) in split.owners_of(d) for i in positions)
        loads = [sum(manifest.samples[i].tiles for i in manifest.owned(owner, m)) for owner in split.owners_of(d)]
        assert max(loads) - min(loads) <= max((manifest.samples[i].tiles for i in positions), default=0)
    alone = manifest_of([sample.tiles for sample in manifest.samples], split.one_replica())
    assert {alone.owner(i) for i in range(len(alone.samples))} <= {-1, *split.owners_of(0)}


@pytest.mark.parametrize("pp", [1, 2])
def test_with_equal_images_each_replica_encodes_its_own(pp):
    split = Split(dp=2, microbatches=2, owners=2 * 2 * pp, stride=2)
    manifest = manifest_of([1] * 32, split)
    assert all(split.belongs(manifest.owner(i), manifest.microbatch_of(i)[0]) for i in range(32))
    assert {len(manifest.owned(owner)) for owner in range(split.owners)} == {32 // split.owners}


def test_single_images_are_spread_over_the_step_too():
    manifest = manifest_of([1, 0, 1, 0, 1, 0, 1, 0], Split(dp=1, microbatches=4, owners=2))
    assert sorted(len(manifest.owned(owner)) for owner in range(2)) == [2, 2]


@given(manifests())
def test_targets_leave_out_bad_samples(manifest):
    assert manifest.targets() - manifest.targets({0}) == manifest.samples[0].targets
    assert manifest.targets(set(range(len(manifest.samples)))) == 0


@given(manifests())
def test_places_are_those_of_the_samples_in_order(manifest):
    places = json.loads(json.dumps(manifest.places()))
    assert places == [[sample.shard, sample.index, sample.epoch] for sample in manifest.samples]


def test_split_of_a_plan():
    plan = small_plan("x", parallel={"vision": "own_ranks", "vision_dp": 3, "dp": 2, "microbatches": 2})
    assert Split.of(plan) == Split(2, 2, 3)
    merged = small_plan("x", parallel={"vision": "first_stage", "vision_dp": 0, "dp": 2, "pp": 2})
    assert Split.of(merged) == Split(2, 1, 2, stride=1, local=True)
    spread = {"vision": "all_ranks", "vision_dp": 0, "dp": 2, "pp": 2, "tp": 2, "microbatches": 4, "encoder_batch": 2}
    assert Split.of(small_plan("x", parallel=spread)) == Split(2, 4, 8, stride=2, together=2)


@pytest.mark.parametrize("split", [Split(2, 1, 1), Split(1, 2, 3), Split(2, 2, 2), Split(4, 1, 4)])
def test_order_and_samples_do_not_depend_on_the_layout(tmp_path, split):
    plan = small_plan(numbered_shards(tmp_path))
    plain, other = DataSource(plan), DataSource(plan)  # two ranks: nothing is shared but the files
    cursors, cursors_other = plain.start(), other.start()
    for step in range(1, 8):
        manifest, cursors = plain.manifest(step, cursors, Split(1, 1, 1))
        manifest_other, cursors_other = other.manifest(step, cursors_other, split)
        assert manifest.samples == manifest_other.samples
    assert cursors == cursors_other
    plain.close()
    other.close()
