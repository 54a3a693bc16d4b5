"""Sharded equals plain: initial values bitwise, losses, logits and gradients in float64."""

import pytest
import rank_functions
import torch
from model_helpers import make_plan

from mmlab.models.build import plain_model
from mmlab.models.sharding import tp_dim

CASES = {
    "tied": {},
    "untied, bias": {"model.language.tied_embeddings": False, "model.language.attention_bias": True},
    "checkpointed": {"train.activation_checkpointing": True},
    "multi-head": {"model.language.kv_heads": 4},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("images", [0, 2])
def test_tensor_parallel_stages_equal_one_rank_in_float64(pool, case, images):
    results = pool.run(rank_functions.against_plain, CASES[case], torch.float64, images, ranks=2)
    for result in results:
        assert max(result[key] for key in ("loss", "grads", "tokens", "logits")) < 1e-12
    assert images == 0 or torch.equal(results[0]["tokens_grad"], results[1]["tokens_grad"])


def test_a_block_costs_two_reductions_each_way(pool):
    result = pool.run(rank_functions.against_plain, {}, torch.float32, 2, ranks=2)[0]
    assert result["forward"] == 1 + 3 * 2 + 1  # embedding, three blocks, loss
    assert result["backward"] == 3 * 2 + 1  # three blocks, logits
    assert result["grads"] < 1e-5


def test_a_microbatch_without_any_target_has_no_loss_and_zero_gradients(pool):
    assert pool.run(rank_functions.without_targets, ranks=2) == [(0.0, 0.0)] * 2


def test_half_precision_computation_keeps_full_precision_gradients(pool):
    results = pool.run(rank_functions.against_plain, {"precision.language": "bf16"}, torch.float32, 2, ranks=2)
    assert 1e-4 < results[0]["grads"] < 0.1


@pytest.mark.parametrize(("ranks", "dtype"), [(2, torch.float32), (2, torch.float64), (4, torch.float32)])
def test_each_rank_starts_with_its_slice_of_the_same_values(pool, ranks, dtype):
    changes = {"model.language.attention_bias": True, "model.language.tied_embeddings": False}
    changes["model.language.kv_heads"] = 4
    plain = dict(plain_model(make_plan(changes), dtype).named_parameters())
    names = {name for name in plain if name.startswith("language.")}
    pool.grow(ranks)
    results = pool.run(rank_functions.initial_shards, changes, dtype, ranks=ranks)
    for rank, shards in enumerate(results):
        assert shards.keys() == names
        for name, shard in shards.items():
            dim = tp_dim(name)
            whole = plain[name].detach()
            assert torch.equal(shard, whole if dim is None else whole.chunk(ranks, dim)[rank]), name


def test_four_ranks_equal_one_in_float64(pool):
    pool.grow(4)
    results = pool.run(rank_functions.against_plain, {"model.language.kv_heads": 4}, torch.float64, 2, ranks=4)
    for result in results:
        assert max(result[key] for key in ("loss", "grads", "tokens", "logits")) < 1e-12
