"""The parts of the model: what they hold, and that the whole computes loss and gradients."""

import pytest
import torch
from model_helpers import make_plan, make_text

from mmlab.models.build import plain_model


@pytest.mark.parametrize("family", ["siglip", "clip"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_of_the_whole_model_gets_a_gradient(family, tied):
    plan = make_plan({"model.vision.family": family, "model.language.tied_embeddings": tied})
    model = plain_model(plan)
    text = make_text(plan, images=2)
    model(text, torch.randn(2, 3, 32, 32)).backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())
