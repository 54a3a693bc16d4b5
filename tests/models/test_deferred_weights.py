"""Backward in two halves: the same gradients, every block computed again at most once."""

import pytest
import torch
from model_helpers import make_plan, make_text

from mmlab.models.build import plain_model
from mmlab.models.layers import defer_weights
from mmlab.parallel.deferred import WeightQueue


def make(plan):
    """A model in float64, its text and images, and a counter of each decoder block's forwards."""
    model, text = plain_model(plan, torch.float64), make_text(plan, images=2)
    pixels = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    calls = dict.fromkeys(model.language.model.layers, 0)

    def count(name):
        def hook(*_):
            calls[name] += 1

        return hook

    for name, block in model.language.model.layers.items():
        block.register_forward_pre_hook(count(name))
    return model, text, pixels, calls


def gradients(model):
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_both_halves_together_are_backward_and_blocks_run_again_once(recompute, tied):
    changes = {"train.activation_checkpointing": recompute, "model.language.tied_embeddings": tied}
    plan = make_plan(changes | {"model.language.attention_bias": True})
    model, text, pixels, _ = make(plan)
    model(text, pixels).backward()
    want = gradients(model)
    model, text, pixels, calls = make(plan)
    queue = WeightQueue()
    defer_weights(model.language, queue)
    defer_weights(model.projector, queue)
    losses = [model(text, pixels) for _ in range(2)]
    for key, loss in enumerate(losses):
        with queue.collect((key, 0)):
            (loss / 2).backward()
    assert set(calls.values()) == {4 if recompute else 2}, "two microbatches, each computed again at most once"
    half = gradients(model)
    weights = [name for name in half if name.endswith("_proj.weight") or name.startswith("projector.linear_1.weight")]
    assert all(half[name] is None for name in weights if name.startswith(("language", "projector")))
    assert half["language.model.norm.weight"] is not None
    seen = []
    queue.run((0, 0), seen.append)
    queue.run((1, 0))
    assert len(seen) == len({id(weight) for weight in seen}), "a weight is done once"
    assert set(calls.values()) == {4 if recompute else 2}
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, want[name], rtol=1e-10, atol=1e-12)
    with pytest.raises(KeyError):
        queue.run((0, 0))


def test_outside_the_input_half_weight_gradients_come_at_once():
    plan = make_plan()
    model, text, pixels, _ = make(plan)
    model(text, pixels).backward()
    want = gradients(model)
    model, text, pixels, _ = make(plan)
    defer_weights(model, WeightQueue())
    model(text, pixels).backward()
    for name, grad in gradients(model).items():
        torch.testing.assert_close(grad, want[name], rtol=1e-10, atol=1e-12)


def test_frozen_weights_leave_nothing_in_the_queue():
    model, text, pixels, _ = make(make_plan({"train.language.frozen": True}))
    queue = WeightQueue()
    defer_weights(model.language, queue)
    with queue.collect((0, 0)):
        model(text, pixels).backward()
    assert queue.weights((0, 0)) == []
    assert model.projector.linear_1.weight.grad is not None
