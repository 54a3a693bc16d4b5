"""Windowed attention block by block equals the same under a whole mask."""

import pytest
import torch

from mmlab.models.attention import LONG, PackedAttention, RingAttention, whole_attention


@pytest.mark.parametrize(("seqlens", "window"), [((LONG,), 100), ((LONG + 7, 3, 700), 30), ((2 * LONG, 2 * LONG), 512)])
def test_long_sequences_are_computed_block_by_block(seqlens, window):
    generator, tokens = torch.Generator().manual_seed(0), sum(seqlens)

    def make(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    q, k, v, grad = make(tokens, 2, 4), make(tokens, 1, 4), make(tokens, 1, 4), make(tokens, 8).detach()
    found = []
    for attend in (whole_attention(seqlens, window, q.device), PackedAttention.of(seqlens, window, q.device)):
        out = attend(q, k, v)
        found.append([out.detach(), *torch.autograd.grad(out, (q, k, v), grad)])
    assert isinstance(whole_attention(seqlens, window, q.device), RingAttention)
    for ours, wanted in zip(*found, strict=True):
        assert float((ours - wanted).norm() / wanted.norm()) < 1e-13


@pytest.mark.parametrize(("seqlens", "window"), [((LONG,), 0), ((LONG - 1,), 8), ((LONG, 5), LONG // 2), ((), 8)])
def test_short_sequences_and_wide_windows_are_one_kernel(seqlens, window):
    assert isinstance(whole_attention(seqlens, window, torch.device("cpu")), PackedAttention)
