"""The parts of the model: what they hold, and that the whole computes loss and gradients."""

import pytest
import torch
from model_helpers import make_plan, make_text

from mmlab.models.build import Part, build_part, plain_model
from mmlab.parallel.tensor import TensorGroup

PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("family", ["siglip", "clip"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_parameter_of_the_whole_model_gets_a_gradient(family, tied):
    plan = make_plan({"model.vision.family": family, "model.language.tied_embeddings": tied})
    model = plain_model(plan)
    model(make_text(plan, images=2), PIXELS).backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters())


@pytest.mark.parametrize("pixels", [None, torch.empty(0, 3, 32, 32)])
def test_text_alone_leaves_the_encoder_without_gradient(pixels):
    plan = make_plan()
    model = plain_model(plan)
    model(make_text(plan), pixels).backward()
    grads = gradients(model)
    assert all((grad is None) == (not name.startswith("language.")) for name, grad in grads.items())


def test_the_loss_is_a_sum_so_microbatches_add_up():
    plan = make_plan({"precision.language": "fp64", "precision.vision": "fp64", "precision.projector": "fp64"})
    model = plain_model(plan, torch.float64)
    together = model(make_text(plan, (5, 9), images=2), PIXELS)
    first = make_text(plan, (5,), images=1)
    assert model(first, PIXELS[:1]) < together
    text = make_text(plan, (5, 9), images=2)
    lengths = text.seqlens
    parts = []
    for index, (start, stop) in enumerate(((0, lengths[0]), (lengths[0], sum(lengths)))):
        hidden = model.language(text, image_tokens=model.image_tokens(PIXELS))[start:stop]
        parts.append(model.language.loss(hidden, text.targets[start:stop]))
        assert parts[index] > 0
    torch.testing.assert_close(sum(parts), together, rtol=1e-14, atol=0)


def test_image_tokens_stand_where_the_placeholders_are_and_get_gradients():
    plan = make_plan()
    language = plain_model(plan).language
    text = make_text(plan, images=2)
    tokens = torch.randn(2, plan.model.vision.tokens_per_tile, 64, requires_grad=True)
    language.loss(language(text, image_tokens=tokens), text.targets).backward()
    assert (tokens.grad.abs().sum(-1) > 0).all()
    swapped = language.loss(language(text, image_tokens=tokens.flip(0)), text.targets)
    assert swapped.item() != language.loss(language(text, image_tokens=tokens), text.targets).item()
    placeholder = language.model.embed_tokens.weight.grad[3].clone()
    with torch.no_grad():
        language.model.embed_tokens.weight[3] += 1.0
    # The placeholder's own row is never seen as input: what gradient it has comes from the output layer.
    language.zero_grad()
    hidden = language(text, image_tokens=tokens)
    torch.autograd.backward(hidden, torch.ones_like(hidden))
    assert language.model.embed_tokens.weight.grad[3].abs().sum() == 0
    assert placeholder.abs().sum() > 0


def test_a_microbatch_without_any_target_has_no_loss_and_zero_gradients():
    model = plain_model(make_plan())
    text = make_text(make_plan(), images=2)
    hidden = model.language(text, image_tokens=model.image_tokens(PIXELS))
    loss = model.language.loss(hidden, torch.full_like(text.targets, -100))
    loss.backward()
    assert loss.item() == 0.0
    assert all(parameter.grad.norm().item() == 0.0 for parameter in model.parameters())


@pytest.mark.parametrize("images", [0, 2])
def test_checkpointed_equals_not_checkpointed(images):
    results = []
    for recompute in (False, True):
        plan = make_plan({"train.activation_checkpointing": recompute})
        model = plain_model(plan)
        loss = model(make_text(plan, images=images), PIXELS[:images])
        loss.backward()
        results.append((loss, gradients(model)))
    (kept, grads), (again, grads_again) = results
    assert torch.equal(kept, again)
    for name, grad in grads.items():
        assert grad is grads_again[name] is None or torch.equal(grad, grads_again[name])


@pytest.mark.parametrize("tied", [True, False])
def test_stages_of_any_split_hold_each_parameter_once_with_the_same_values(tied):
    plan = make_plan({"model.language.tied_embeddings": tied})
    plain = plain_model(plan)
    text = make_text(plan)
    for borders in ([0, 3], [0, 1, 3], [0, 2, 3], [0, 1, 2, 3]):
        names, hidden, last = [], None, len(borders) - 2
        for stage in range(last + 1):
            part = Part(chunks=(range(*borders[stage : stage + 2]),), embed=stage == 0, head=stage == last)
            model = build_part(plan, part, TensorGroup(), torch.float32)
            hidden = model.language(text, hidden)
            names += gradients(model)
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter, plain.get_parameter(name))
        copies = [name for name in set(names) if names.count(name) > 1]
        assert copies == (["language.model.embed_tokens.weight"] if tied and last else [])
        assert set(names) == {name for name in gradients(plain) if name.startswith("language.")}
        assert torch.equal(hidden, plain.language(text))


def test_a_stage_in_the_middle_needs_hidden_states():
    model = build_part(make_plan(), Part(chunks=(range(1, 2),)), TensorGroup(), torch.float32)
    with pytest.raises(ValueError, match="does not embed"):
        model.language(make_text(make_plan()))


def test_frozen_modules_need_no_gradient_and_pass_it_on():
    plan = make_plan({"train.language.frozen": True, "train.vision.frozen": True})
    model = plain_model(plan)
    model(make_text(plan, images=2), PIXELS).backward()
    assert {name for name, grad in gradients(model).items() if grad is not None} == {
        f"projector.linear_{layer}.{kind}" for layer in (1, 2) for kind in ("weight", "bias")
    }


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", torch.bfloat16), ("fp64", torch.float64)])
def test_modules_compute_in_the_plans_format_on_full_precision_weights(precision, dtype):
    plan = make_plan({f"precision.{module}": precision for module in ("vision", "projector", "language")})
    model, reference = plain_model(plan), plain_model(make_plan())
    text = make_text(plan, images=2)
    tokens = model.image_tokens(PIXELS)
    hidden = model.language(text, image_tokens=tokens)
    assert tokens.dtype == hidden.dtype == model.vision(PIXELS).dtype == dtype
    loss = model.language.loss(hidden, text.targets)
    loss.backward()
    assert {parameter.grad.dtype for parameter in model.parameters()} == {torch.float32}
    assert loss.item() == pytest.approx(reference(text, PIXELS).item(), rel=0.02)
    assert loss.item() != reference(text, PIXELS).item()
