"""The shared-memory backend gives what gloo gives."""

import errno
import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import shm_draw
import shm_functions
import torch

from mmlab.messages.shared_file import Layout
from mmlab.parallel import shm
from mmlab.parallel.shm import segment
from mmlab.plan.rules.cluster import least_shm_bytes


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
        ours, theirs = (pool.run(shm_draw.sequence, backend, seed, 60, ranks=ranks) for backend in ("shm", "gloo"))
        for rank in range(ranks):
            assert_same(ours[rank], theirs[rank])


def test_threads_with_a_group_each(pool):
    ours, theirs = (pool.run(shm_draw.several_groups, backend, 25, ranks=2) for backend in ("shm", "gloo"))
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
        open_files = [count for count, _ in found]  # the store's server closes what its clients closed, a little later
        assert min(open_files[-5:]) <= max(open_files[:5])
    assert not shm_functions.left_behind()


def test_where_shared_memory_is_short_the_next_best_is_used_and_named(pool, tmp_path):
    results = pool.run(shm_functions.transports, ("/nowhere", str(tmp_path)), 8 << 20, ranks=2)
    for rank, (transport, total, found) in enumerate(results):
        assert transport == f"shared memory in {tmp_path} (/nowhere has no room (No such file or directory))"
        assert (total, found) == (200_000.0, [1.0 - rank] * 2)
    results = pool.run(shm_functions.transports, ("/nowhere",), 8 << 20, ranks=2)
    for rank, (transport, total, found) in enumerate(results):
        assert transport == "gloo (/nowhere has no room (No such file or directory))"
        assert (total, found) == (200_000.0, [1.0 - rank] * 2)


def test_the_groups_of_a_host_stay_within_what_the_plan_gives_them(pool):
    """Each new group gets less and less, then none: then it says so and uses gloo."""
    for sizes, transports in pool.run(shm_functions.sizes, 600_000, ranks=2):
        assert sum(sizes) <= 600_000
        assert 5 < len(sizes) < 31
        assert transports[0].startswith("gloo (cluster.shm_mb leaves 0.0")
        assert transports[1:] == [shm.BEST]


def test_a_full_folder_is_an_error_and_no_bus_error(tmp_path):
    with pytest.raises(OSError, match=r"No space left|File too large"):
        segment._take("/dev/shm", 1 << 50)
    assert not shm_functions.left_behind()
    descriptor, layout, folder, reason = segment.create(2, 1 << 20, (str(tmp_path / "missing"), str(tmp_path)))
    assert os.fstat(descriptor).st_size == layout.size <= 1 << 21
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


def test_the_rule_knows_the_smallest_file():
    for ranks in (2, 3, 8, 64, 256):
        assert least_shm_bytes(ranks) == Layout.within(ranks, 0).size


@pytest.mark.slow
def test_a_docker_sized_dev_shm_holds_the_groups_of_a_run(tmp_path):
    """64 MB, as Docker gives, then 1 MB: the groups shrink; when nothing is left they say so and go on."""
    program = Path(__file__).with_name("shm_small.py")
    # a mount namespace of its own (and, but for root, a user namespace): nothing outside sees the small /dev/shm
    alone = ["unshare", "-m" if os.geteuid() == 0 else "-Urm"]
    probe = subprocess.run([*alone, "mount", "-t", "tmpfs", "tmpfs", "/dev/shm"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"this kernel or container lets nobody mount in a namespace: {probe.stderr.strip()}")
    for megabytes in (64, 1):
        command = f"mount -t tmpfs -o size={megabytes}m tmpfs /dev/shm && exec {sys.executable} {program} {megabytes}"
        done = subprocess.run([*alone, "sh", "-c", command], capture_output=True, text=True, timeout=90)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "ok"


def test_other_machines_are_refused(monkeypatch):
    assert segment.refusal() == ""
    monkeypatch.setattr(segment.platform, "machine", lambda: "aarch64")
    assert "x86-64" in segment.refusal()
