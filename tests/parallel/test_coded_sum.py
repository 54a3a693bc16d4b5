"""Coded sums on several ranks: nothing is lost for good, all ranks have equal bits, what is not finite stays seen."""

import coded_functions
import pytest
import torch
from coded_functions import BACKENDS, CODECS, STEPS, codec_of, gradient

from mmlab.parallel.compression.exchange import cut, handed_over, slot

CASES = [(name, 2500) for name in CODECS] + [(name, 3) for name in CODECS] + [("int8", 1), ("int8", 300)]
"""Codecs and lengths of buckets: long ones, and such that have fewer elements or blocks than there are ranks."""
tiers = [pytest.param(2, marks=pytest.mark.slow), 3, pytest.param(4, marks=pytest.mark.slow)]


def plainly(name, gradients):
    """(the sum, what each rank must have kept) of one step by the definition, with gradients that are corrected."""
    codec, ranks, count = codec_of(name), len(gradients), gradients[0].numel()
    total, lost = torch.zeros(count, dtype=torch.float64), [torch.zeros(count, dtype=torch.float64) for _ in gradients]

    def through(x):
        payload, out = torch.empty(codec.size(x.numel()), dtype=torch.uint8), torch.empty_like(x)
        codec.encode(x, payload)
        codec.decode(payload, out)
        return out

    share = -(-count // (ranks * codec.align)) * codec.align
    for owner in range(ranks):
        mine = slice(owner * share, min(count, (owner + 1) * share))
        if mine.start >= count:
            continue
        parts = [x[mine] if rank == owner else through(x[mine]) for rank, x in enumerate(gradients)]
        for rank, x in enumerate(gradients):
            lost[rank][mine] = x[mine] - parts[rank]
        summed = sum(parts[1:], parts[0])
        total[mine] = through(summed)
        lost[owner][mine] = summed - total[mine]
    return total, lost


@pytest.mark.parametrize("ranks", tiers)
def test_coded_sums(pool, ranks):
    pool.grow(ranks)
    results = pool.run(coded_functions.sums, CASES, ranks=ranks)
    for i, (name, count) in enumerate(CASES):
        residuals = [torch.zeros(count, dtype=torch.float64) for _ in range(ranks)]
        for step in range(STEPS):
            gradients = [gradient(rank, step, count) for rank in range(ranks)]
            went_in = sum(gradients) + sum(residuals)
            expected, residuals = plainly(name, [g + r for g, r in zip(gradients, residuals, strict=True)])
            forgetful, _ = plainly(name, gradients)
            for rank, result in enumerate(results):
                found = {how: result["found"][how][step][i] for how in result["found"]}
                for how in (*BACKENDS, "scaled"):
                    reduced, kept = found[how]
                    assert torch.equal(reduced, expected), (name, count, how)
                    assert torch.equal(kept, residuals[rank]), (name, count, how)
                assert torch.equal(found["forgetful"][0], forgetful)
                assert found["forgetful"][1] is None
            came_out = found["gloo"][0] + sum(result["found"]["gloo"][step][i][1] for result in results)
            torch.testing.assert_close(came_out, went_in, rtol=1e-12, atol=1e-14)
    for rank, result in enumerate(results):
        formula = STEPS * sum(handed_over(codec_of(name), count, ranks, rank) for name, count in CASES)
        assert result["traffic"] == dict.fromkeys(BACKENDS, formula)


@pytest.mark.parametrize("ranks", tiers)
def test_what_is_not_finite_is_seen_by_all_and_kept_by_none(pool, ranks):
    pool.grow(ranks)
    count = 3000
    results = pool.run(coded_functions.spoilt, count, ranks=ranks)
    for name in CODECS:
        chunks = cut(torch.arange(count), ranks, codec_of(name).align)
        for step, place in enumerate((None, count // 3, count - 1, None)):
            finite = [result[name][step][0].isfinite() for result in results]
            assert all(torch.equal(mask, finite[0]) for mask in finite)
            assert all(result[name][step][1].isfinite().all() for result in results)
            for chunk in chunks:
                assert finite[0][chunk].all() == (place not in chunk.tolist()), (name, step)
        # what was kept from before the NaN, and what was not hit by it, comes out later
        residuals = sum(result[name][3][1] for result in results)
        assert residuals.abs().max() < 100


def test_bytes_by_hand():
    """700 elements in blocks of 256 on two ranks: chunks of 512 and 188, and payloads at multiples of 8 bytes."""
    int8 = codec_of("int8")
    first, second = 2 * 4 + 512, 4 + 188
    assert [slot(int8, 512), slot(int8, 188), slot(int8, 187)] == [first, second, second]
    assert handed_over(int8, 700, 2, rank=0) == second + first
    assert handed_over(int8, 700, 2, rank=1) == first + first
    assert handed_over(int8, 3, 4, rank=0) == 8  # the sum of its chunk; nobody else has one
    assert handed_over(int8, 3, 4, rank=3) == 8 + 8
    assert handed_over(codec_of("onebit"), 1 << 20, 2, rank=0) == (1 << 20) // 8 + 4 * (1 << 20) // 256
    assert slot(codec_of("topk"), 0) == 0


@pytest.mark.parametrize("ranks", [2])
def test_what_becomes_of_residuals(pool, ranks):
    results = pool.run(coded_functions.left, ranks=ranks)
    sums = [sum(gradient(rank, step, 300) for rank in range(ranks)) for step in range(4)]
    for policy in ("flush", "keep", "drop"):
        before = sum(result[policy]["before"] for result in results)
        assert before.abs().max() > 1e-4
        for result in results:
            found = result[policy]
            assert found["memory"] == 300 * 8
            assert found["memory left"] == (300 * 8 if policy == "keep" else 0)
            assert (found["left"] is not None) == (policy == "keep")
            close = {"rtol": 1e-12, "atol": 1e-14}
            torch.testing.assert_close(found["dense"], sums[1] + (before if policy == "flush" else 0), **close)
            torch.testing.assert_close(found["unbiased"], sums[2], **close)
            torch.testing.assert_close(found["again"], sums[3] + (before if policy == "keep" else 0), **close)


def test_a_step_that_is_left_out_can_be_taken_back(pool):
    for result in pool.run(coded_functions.undone, ranks=2):
        assert result[True]["same"]
        assert torch.equal(result[True]["reduced"], result[False]["reduced"])
        assert torch.equal(result[True]["residual"], result[False]["residual"])
