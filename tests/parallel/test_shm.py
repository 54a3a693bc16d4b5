"""The shared-memory backend gives what gloo gives."""

import errno
import itertools
import os

import pytest
import shm_functions
import torch

from mmlab.parallel.shm import segment
from mmlab.parallel.shm.layout import Layout


def assert_same(left, right):
    assert len(left) == len(right)
    for i, (ours, theirs) in enumerate(zip(left, right, strict=True)):
        assert len(ours) == len(theirs), i
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == b.dtype, i
            assert torch.equal(a, b), i


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_random_sequence_of_calls_equals_gloo(pool, ranks):
    pool.grow(ranks)
    for seed in range(2):
        ours, theirs = (pool.run(shm_functions.sequence, backend, seed, 60, ranks=ranks) for backend in ("shm", "gloo"))
        for rank in range(ranks):
            assert_same(ours[rank], theirs[rank])


def test_threads_with_a_group_each(pool):
    ours, theirs = (pool.run(shm_functions.several_groups, backend, 25, ranks=2) for backend in ("shm", "gloo"))
    for rank in range(2):
        for thread in range(3):
            assert_same(ours[rank][thread], theirs[rank][thread])


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_are_formed_in_the_order_of_the_ranks(pool, ranks):
    pool.grow(ranks)
    for found in pool.run(shm_functions.sums, ranks=ranks):
        assert found == dict.fromkeys(found, True)
        assert "refused" in found


def test_messages_larger_than_a_ring_do_not_block_their_sender(pool):
    for found in pool.run(shm_functions.big_messages, ranks=2):
        assert found["same"]


def test_async_calls_go_on_by_themselves(pool):
    for found in pool.run(shm_functions.overlap, ranks=2):
        assert found == {"finished": [True, True], "sums": [4_000_000.0] * 2, "future": [6.0, 6.0]}


def test_many_groups_one_after_the_other_leave_nothing(pool):
    for found in pool.run(shm_functions.again, 20, ranks=2):
        assert [mapped for _, mapped in found] == [0] * 20
        assert found[-1][0] <= found[3][0]
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("mmlab-shm")]


def test_where_shared_memory_is_short_the_next_best_is_used_and_named(pool, tmp_path):
    results = pool.run(shm_functions.transports, ("/nowhere", str(tmp_path)), 1 << 20, ranks=2)
    for rank, (transport, total, found) in enumerate(results):
        assert transport.startswith(f"shared memory in {tmp_path} (/nowhere has no room for 1")
        assert (total, found) == (200_000.0, [1.0 - rank] * 2)
    results = pool.run(shm_functions.transports, ("/dev/shm",), 1 << 50, ranks=2)
    for rank, (transport, total, found) in enumerate(results):
        assert transport.startswith("gloo (/dev/shm has no room for")
        assert (total, found) == (200_000.0, [1.0 - rank] * 2)


def test_a_full_folder_is_an_error_and_no_bus_error(tmp_path):
    with pytest.raises(OSError, match="/dev/shm has no room"):
        segment.create(1 << 50, ("/dev/shm",))
    assert not [name for name in os.listdir("/dev/shm") if name.startswith("mmlab-shm")]
    descriptor, folder, reason = segment.create(4096, (str(tmp_path / "missing"), str(tmp_path)))
    os.close(descriptor)
    assert folder == str(tmp_path)
    assert os.strerror(errno.ENOENT) in reason
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 64])
def test_the_parts_of_a_file_do_not_overlap(ranks):
    layout = Layout.within(ranks, 8 << 20)
    spans = [(0, 8192)]
    spans += [(8 * layout.block(rank), 512) for rank in range(ranks)]
    pairs = [(a, b) for a in range(ranks) for b in range(ranks) if a != b]
    spans += [(8 * layout.ring_block(*pair), 256) for pair in pairs]
    spans += [(layout.slot_at(rank, parity), layout.slot) for rank in range(ranks) for parity in (0, 1)]
    spans += [(layout.ring_at(*pair), layout.ring) for pair in pairs]
    spans.sort()
    assert all(start + size <= following for (start, size), (following, _) in itertools.pairwise(spans))
    assert sum(spans[-1]) == layout.size
    assert layout.size <= (8 << 20) + (64 << 10) + (ranks**2) * (4096 + 256)


def test_other_machines_are_refused(monkeypatch):
    assert segment.refusal() == ""
    monkeypatch.setattr(segment.platform, "machine", lambda: "aarch64")
    assert "x86-64" in segment.refusal()
