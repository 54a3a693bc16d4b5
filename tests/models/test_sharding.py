"""Parameters as data: names, shapes, initial values."""

import subprocess
import sys
from math import log

import pytest
import torch
from model_helpers import make_plan, make_text

from mmlab.models.build import plain_model
from mmlab.models.initial import initial_values
from mmlab.models.sharding import ParameterSpec, parameter_shapes, parameter_specs, tp_dim

VARIANTS = [
    {},
    {"model.vision.family": "clip", "model.projector.hidden": 40},
    {"model.language.attention_bias": True, "model.language.tied_embeddings": False},
]


@pytest.mark.parametrize("changes", VARIANTS)
def test_the_table_is_what_the_model_has(changes):
    plan = make_plan(changes)
    model = {name: tuple(parameter.shape) for name, parameter in plain_model(plan).named_parameters()}
    assert model == parameter_shapes(plan)


def test_the_table_needs_no_torch():
    code = "import sys, mmlab.models.sharding, mmlab.models.hugging_face; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("parts", [2, 3, 4, 8])
@pytest.mark.parametrize(("shape", "dim"), [((1000, 32), 0), ((24, 960), 1), ((7, 3, 4, 4), 0), ((96,), 0)])
def test_slices_of_initial_values_are_bitwise_those_of_the_whole(shape, dim, parts):
    spec = ParameterSpec(shape, "normal", 0.5)
    size = shape[dim]
    whole = initial_values(3, "a", spec, (dim, 0, size))
    borders = [size * part // parts for part in range(parts + 1)]
    slices = [initial_values(3, "a", spec, (dim, *borders[i : i + 2])) for i in range(parts)]
    assert torch.equal(torch.cat(slices, dim), whole)


def test_initial_values_follow_from_seed_and_name():
    spec = ParameterSpec((512, 64), "normal", 0.02)
    part = (0, 0, 512)
    values = initial_values(0, "a", spec, part)
    assert torch.equal(values, initial_values(0, "a", spec, part))
    for other in (initial_values(1, "a", spec, part), initial_values(0, "b", spec, part)):
        assert (values - other).abs().mean() > 0.01
    assert values.std().item() == pytest.approx(0.02, rel=0.02)
    assert values.mean().item() == pytest.approx(0.0, abs=5e-4)
    rows = values.flatten(1)
    assert len(torch.unique(rows[:, 0])) == 512  # no block repeats another


@pytest.mark.parametrize("changes", VARIANTS)
def test_models_start_within_one_nat_of_the_uniform_guess(changes):
    plan = make_plan(changes)
    text = make_text(plan, (40, 40), images=1)
    loss = plain_model(plan)(text, torch.randn(1, 3, 32, 32)) / (text.targets >= 0).sum()
    assert 0 < loss.item() - log(96) < 1


def test_every_split_parameter_divides_by_the_degrees_that_the_heads_admit():
    plan = make_plan({"model.language.attention_bias": True, "model.language.tied_embeddings": False})
    split = {name: spec.shape[dim] for name, spec in parameter_specs(plan).items() if (dim := tp_dim(name)) is not None}
    assert len(split) == 2 + plan.model.language.layers * (6 + 1 + 1 + 2)
    assert all(size % plan.model.language.kv_heads == 0 for size in split.values())
