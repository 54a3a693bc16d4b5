"""Tensor-parallel primitives against what one process computes."""

import pytest
import tensor_functions
import torch

from mmlab.parallel.tensor import (
    TensorGroup,
    copy_to_group,
    gather_from_group,
    reduce_from_group,
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
)


def test_copy_and_reduce_are_each_others_transpose(pool):
    for rank, result in enumerate(pool.run(tensor_functions.copy_and_reduce, ranks=2)):
        assert result["copied"].tolist() == [rank + 1.0] * 3
        assert result["copy_grad"].tolist() == [30.0] * 3
        assert result["reduced"].tolist() == [3.0] * 3
        assert result["reduce_grad"].tolist() == [10.0 * (rank + 1)] * 3


def test_gather_concatenates_the_last_dim(pool):
    for rank, result in enumerate(pool.run(tensor_functions.gather, ranks=2)):
        assert result["whole"].tolist() == [[0.0, 1.0, 10.0, 11.0], [2.0, 3.0, 12.0, 13.0]]
        assert result["grad"].tolist() == [[2.0 * rank, 2.0 * rank + 1], [4.0 + 2 * rank, 5.0 + 2 * rank]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vocabulary_parallel_embedding_is_bitwise_the_plain_one(pool, dtype):
    assert pool.run(tensor_functions.embedding, dtype, ranks=2) == [{"same": True, "grad": True}] * 2


@pytest.mark.parametrize("scale", [1.0, 300.0])
@pytest.mark.parametrize("masked", [False, True])
def test_vocabulary_parallel_cross_entropy_needs_one_reduction(pool, scale, masked):
    for result in pool.run(tensor_functions.cross_entropy, scale, masked, ranks=2):
        torch.testing.assert_close(result["loss"], result["wanted"], rtol=1e-14, atol=1e-14)
        torch.testing.assert_close(result["grad"], result["wanted_grad"], rtol=1e-12, atol=1e-14)
        assert result["calls"] == 1
        assert (result["loss"] == 0) == masked


def test_gradients_keep_the_placements_of_their_parameters(pool):
    for result in pool.run(tensor_functions.local_parameters, ranks=2):
        assert result["split"].tolist() == [[3.0] * 3] * 4
        assert result["replicated"].tolist() == [[3.0] * 3] * 2


def test_one_rank_needs_no_group():
    alone = TensorGroup()
    x = torch.randn(4, 6)
    assert copy_to_group(x, alone) is reduce_from_group(x, alone) is gather_from_group(x, alone) is x
    ids = torch.tensor([3, 0])
    assert torch.equal(vocab_parallel_embedding(ids, x, alone), x[ids])
    loss = vocab_parallel_cross_entropy(x.bfloat16(), torch.tensor([1, -100, 2, 5]), alone)
    assert loss.dtype == torch.float32
