"""What ranks of a pool compute in the tests of decoders that share tokens."""

from datetime import timedelta

import torch
import torch.distributed as dist
from model_helpers import make_plan, make_text
from torch.distributed.device_mesh import init_device_mesh

from mmlab.models.attention import SharedText, own_ends, share
from mmlab.models.build import Part, build_part, plain_model
from mmlab.parallel.buckets import local_tensor, split_over_tp
from mmlab.parallel.context.split import ContextGroup
from mmlab.parallel.tensor import TensorGroup


def relative(a, b, floor=0.0):
    return float((a - b).norm() / b.norm().clamp(min=max(floor, 1e-30)))


def against_plain(rank, world, host, port, changes, cases) -> list[dict]:
    """(sequence lengths, images) each: differences of loss, gradients and next-token logits from one rank's."""
    limit = timedelta(seconds=30)
    store = dist.TCPStore(host, port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    plan = make_plan(changes)
    p = plan.parallel
    grid = init_device_mesh("cpu", (p.cp, p.tp), mesh_dim_names=("cp", "tp"))
    tp = TensorGroup()
    if p.tp > 1:
        tp = TensorGroup(grid["tp"].get_group(), grid["tp"].get_local_rank(), p.tp, grid["tp"], sequence=p.sp)
    cp = ContextGroup(grid["cp"].get_group(), grid["cp"].get_local_rank(), p.cp, p.cp_mode, p.cp_scope)
    part = Part(chunks=(range(3),), embed=True, head=True)
    ours, plain = build_part(plan, part, tp, torch.float64).language, plain_model(plan, torch.float64).language
    return [_case(plan, ours, plain, cp, lengths, images) for lengths, images in cases]


def _case(plan, ours, plain, cp, lengths, images) -> dict:
    text = make_text(plan, lengths, images)
    tp = ours.tp
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randn(text.image_tokens, plan.model.language.hidden, generator=generator, dtype=torch.float64)
    given, own_given = (tokens.clone().requires_grad_() if images else None for _ in range(2))
    plain.zero_grad()
    ours.zero_grad()
    hidden = plain(text, image_tokens=given)
    wanted = plain.loss(hidden, text.targets)
    wanted.backward()
    mine = share(text, plan.model, cp)
    assert isinstance(mine, SharedText)
    rows = None if own_given is None else own_given.index_select(0, mine.image_rows)
    here = ours(mine, image_tokens=rows)
    assert here.shape == ours.hidden_shape(mine)
    loss = ours.loss(here, mine.targets)
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total, group=cp.group)
    errors = {"loss": relative(total, wanted.detach(), 1.0)}
    which, at = own_ends(mine)
    logits = plain.logits(hidden)[torch.tensor(lengths_of(text))[which].long()]
    if len(which):
        errors["logits"] = relative(ours.logits(here, at, mine.tokens), logits)
    else:
        ours.logits(here, at, mine.tokens)
    if images:
        grad = own_given.grad.clone()
        dist.all_reduce(grad, group=cp.group)
        errors["tokens"] = relative(grad, given.grad, 1e-8)
    return errors | {"grads": _worst(ours, plain, cp, tp)}


def lengths_of(text):
    """Row of the last token of each sequence."""
    return [sum(text.seqlens[: i + 1]) - 1 for i in range(len(text.seqlens))]


def _worst(ours, plain, cp, tp) -> float:
    """Largest relative difference of a gradient, after the sums that a step makes."""
    reference = dict(plain.named_parameters())
    norm = torch.stack([p.grad.norm() for p in reference.values()]).norm()
    worst = 0.0
    for name, parameter in ours.named_parameters():
        grad = local_tensor(parameter.grad).clone()
        want = reference[name].grad
        if split_over_tp(parameter):
            want = want.chunk(tp.size, parameter.placements[-1].dim)[tp.rank]
        elif tp.sequence:
            dist.all_reduce(grad, group=tp.group)
        dist.all_reduce(grad, group=cp.group)
        worst = max(worst, relative(grad, want, 1e-3 * float(norm)))
    return worst
