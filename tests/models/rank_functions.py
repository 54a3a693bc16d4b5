"""What ranks of a pool compute in the tests of tensor-parallel models."""

from contextlib import contextmanager
from datetime import timedelta
from unittest.mock import patch

import torch
import torch.distributed as dist
from model_helpers import make_plan, make_text
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from mmlab.models.build import Part, build_part, plain_model
from mmlab.models.weights import init_from
from mmlab.parallel.tensor import TensorGroup


def join(rank: int, world: int, host: str, port: int) -> TensorGroup:
    """A tensor group of all ranks."""
    limit = timedelta(seconds=30)
    store = dist.TCPStore(host, port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    mesh = DeviceMesh("cpu", list(range(world)), mesh_dim_names=("tp",))
    return TensorGroup(mesh.get_group(), rank, world, mesh)


@contextmanager
def counted_reductions():
    """Counts the all-reduces in its body."""
    sizes: list[int] = []
    real = dist.all_reduce

    def count(tensor, *args, **kwargs):
        sizes.append(tensor.numel())
        return real(tensor, *args, **kwargs)

    with patch.object(dist, "all_reduce", count):
        yield sizes


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def against_plain(rank, world, host, port, changes, dtype, images) -> dict:
    """Two stages on one tensor group against the whole model on one rank: differences and collectives."""
    tp = join(rank, world, host, port)
    plan = make_plan(changes)
    text = make_text(plan, images=images)
    pixels = torch.randn(images, 3, 32, 32, generator=torch.Generator().manual_seed(1), dtype=dtype)
    plain = plain_model(plan, dtype)
    tokens = plain.image_tokens(pixels).detach().requires_grad_() if images else None
    whole = plain.language.loss(plain.language(text, image_tokens=tokens), text.targets)
    whole.backward()
    first = build_part(plan, Part(chunks=(range(2),), embed=True), tp, dtype).language
    last = build_part(plan, Part(chunks=(range(2, 3),), head=True), tp, dtype).language
    own_tokens = tokens.detach().requires_grad_() if images else None
    with counted_reductions() as forward:
        hidden = last(text, first(text, image_tokens=own_tokens))
        loss = last.loss(hidden, text.targets)
    with counted_reductions() as backward:
        loss.backward()
    logits = relative(last.logits(hidden), plain.language.logits(plain.language(text, image_tokens=tokens)))
    grads: dict[str, torch.Tensor] = {}
    for stage in (first, last):
        for name, parameter in stage.named_parameters():
            assert isinstance(parameter, DTensor)
            whole_grad = parameter.grad.full_tensor()
            grads[name] = grads[name] + whole_grad if name in grads else whole_grad
    wanted = {name: parameter.grad for name, parameter in plain.language.named_parameters()}
    assert grads.keys() == wanted.keys()
    norm = torch.stack([grad.norm() for grad in wanted.values()]).norm()
    return {
        "loss": abs(loss - whole).item() / whole.item(),
        "grads": max(((grads[n] - wanted[n]).norm() / wanted[n].norm().clamp(min=1e-8 * norm)).item() for n in wanted),
        "tokens": relative(own_tokens.grad, tokens.grad) if images else 0.0,
        "logits": logits,
        "forward": len(forward),
        "backward": len(backward),
        "tokens_grad": own_tokens.grad if images else None,
    }


def without_targets(rank, world, host, port) -> tuple[float, float]:
    """Loss, and norm of the gradient, of a microbatch whose samples are all masked."""
    tp = join(rank, world, host, port)
    plan = make_plan()
    text = make_text(plan)
    model = build_part(plan, Part(chunks=(range(3),), embed=True, head=True), tp, torch.float32)
    loss = model.language.loss(model.language(text), torch.full_like(text.targets, -100))
    loss.backward()
    return loss.item(), sum(parameter.grad.full_tensor().norm().item() for parameter in model.parameters())


def initial_shards(rank, world, host, port, changes, dtype) -> dict[str, torch.Tensor]:
    """This rank's shards of every parameter of the decoder, made stage by stage."""
    tp = join(rank, world, host, port)
    plan = make_plan(changes)
    shards = {}
    for part in (
        Part(chunks=(range(1),), embed=True),
        Part(chunks=(range(1, 2),)),
        Part(chunks=(range(2, 3),), head=True),
    ):
        for name, parameter in build_part(plan, part, tp, dtype).named_parameters():
            shards[name] = parameter.to_local().detach()
    return shards


def loaded_shards(rank, world, host, port, changes) -> dict[str, torch.Tensor]:
    """This rank's shards of the decoder after loading the weights that the plan names."""
    tp = join(rank, world, host, port)
    plan = make_plan(changes)
    model = build_part(plan, Part(chunks=(range(3),), embed=True, head=True), tp, torch.float32)
    init_from(model, plan)
    return {name: parameter.to_local().detach() for name, parameter in model.named_parameters()}
