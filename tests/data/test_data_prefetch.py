"""Decoding ahead: how far, in which memory, and that nothing of it stays."""

import gc
import itertools
import os
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from data_helpers import numbered_shards, small_plan

from mmlab.data.pipeline import DataSource, joined
from mmlab.data.prefetch import Prefetcher
from mmlab.train.feed import Feed


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MMLAB_DATA", str(tmp_path / "cache"))


def wait_until(happened):
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def open_batches() -> int:
    """Files in memory through which decode processes hand batches over."""
    names = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    return sum("mmlab-batch" in os.readlink(name) for name in names if os.path.lexists(name))


def consume(plan, others):
    """Five steps, and one after a restore."""
    mesh = SimpleNamespace(place=SimpleNamespace(vision=0, dp=0, role="vision"), control=None)
    source = DataSource(plan)
    feed = Feed(plan, mesh, source)
    feed.reset(feed.cursors, 0)
    cursors = source.start()
    for step in range(1, 6):
        batch = feed.batch()
        expected, cursors = source.manifest(step, cursors)
        assert batch.manifest == expected
        assert torch.equal(torch.cat(list(batch.pixels.values())), source.pixels(expected, range(4))[0])
        wait_until(lambda: feed.queued() == 3)
        assert open_batches() - others == (3 if plan.data.workers else 0)
        feed.agree(feed.next_bad())
    assert feed.cursors == cursors  # of what was consumed, not of what was decoded
    again = feed.cursors
    feed.reset(again, 5)  # as a restore does: what was decoded ahead goes
    assert feed.batch().manifest == source.manifest(6, again)[0]
    assert feed.queued() <= 3
    feed.close()
    source.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_as_many_steps_as_the_plan_says_are_held_and_the_queue_is_told(tmp_path, workers):
    plan = small_plan(numbered_shards(tmp_path / "set"), data={"workers": workers, "prefetch": 3, "global_batch": 4})
    gc.collect()
    others = open_batches()
    consume(plan, others)
    gc.collect()
    assert open_batches() <= others


def test_pixels_of_a_step_are_one_buffer_and_survive_what_comes_after(tmp_path):
    source = DataSource(small_plan(numbered_shards(tmp_path / "set"), data={"global_batch": 8}))
    first, after = source.manifest(1, source.start())
    second, _ = source.manifest(2, after)
    with Prefetcher(source, 1) as prefetcher:
        prefetcher.submit(first, range(8))
        pixels, _ = prefetcher.take(first)
        places = [tensor.data_ptr() for tensor in pixels.values()]
        assert np.ptp(np.diff(places)) == 0
        assert len({tensor.untyped_storage().data_ptr() for tensor in pixels.values()}) == 1
        before = torch.cat(list(pixels.values()))
        prefetcher.submit(second, range(8))
        prefetcher.drop()
        prefetcher.submit(second, range(8))
        wait_until(lambda: prefetcher.done(second))
        prefetcher.take(second)
        assert torch.equal(joined(list(pixels.values())), before)
        assert joined(list(pixels.values())).data_ptr() == places[0]
        assert joined([pixels[2], pixels[1]]).data_ptr() not in places
        assert torch.equal(joined([pixels[2], pixels[1]]), torch.cat([pixels[2], pixels[1]]))


def test_a_file_is_used_again_only_when_no_job_will_write_to_it(tmp_path):
    source = DataSource(small_plan(numbered_shards(tmp_path / "set"), data={"global_batch": 8}))
    steps, position = [], source.start()
    for number in range(30):
        manifest, position = source.manifest(number + 1, position)
        steps.append(manifest)
    with Prefetcher(source, 1) as prefetcher:
        for first, second in itertools.pairwise(steps):
            prefetcher.submit(first, range(8))
            prefetcher.drop()  # while its jobs wait or run
            prefetcher.submit(second, range(8))
            pixels, _ = prefetcher.take(second)
            assert torch.equal(joined(list(pixels.values())), source.pixels(second, range(8))[0])
    source.close()
    source.close()
