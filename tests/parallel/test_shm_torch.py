"""torch's own parallelism on the shared-memory backend gives the gradients of one process."""

import pytest
import shm_torch


@pytest.mark.parametrize("ranks", [2, 3])
def test_fully_sharded_and_distributed_checkpoint(pool, tmp_path, ranks):
    pool.grow(ranks)
    for found in pool.run(shm_torch.fsdp, str(tmp_path / "saved"), ranks=ranks):
        assert found["fsdp"] < 1e-12
        assert found["checkpoint"]
        assert found["bf16"] < 2e-2


@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel(pool, ranks):
    pool.grow(ranks)
    for found in pool.run(shm_torch.tensor_parallel, ranks=ranks):
        assert max(found.values()) < 1e-12


@pytest.mark.parametrize("ranks", [2, 4])
def test_replicas(pool, ranks):
    pool.grow(ranks)
    for found in pool.run(shm_torch.replicas, ranks=ranks):
        assert max(found.values()) < 1e-12
        assert len(found) == ranks // 2


def test_pipelining(pool):
    assert max(pool.run(shm_torch.pipeline, ranks=2)) < 1e-12
