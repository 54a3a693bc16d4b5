"""Codecs: against their definitions written plainly, at their bounds, and on what is not finite."""

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from mmlab.parallel.compression.codecs import Bf16, Fp16, Int8, OneBit, Plain, TopK, largest

ALL = {
    "plain": lambda dtype: Plain(dtype),
    "bf16": lambda _: Bf16(),
    "fp16": lambda _: Fp16(),
    "int8": lambda _: Int8(),
    "onebit": lambda _: OneBit(),
    "topk": lambda _: TopK(0.1),
    "topk of everything": lambda _: TopK(1.0),
}
COUNTS = (0, 1, 7, 8, 255, 256, 257, 1023, 1024, 1025, 5000)
each = pytest.mark.parametrize("name", ALL)
types = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
lossy = pytest.mark.parametrize("name", [name for name in ALL if name != "plain"])
GUARD = 0xA5


def normal(count, dtype=torch.float32, seed=0):
    """Values whose magnitudes spread over some orders, as those of gradients do."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(count, generator=generator, dtype=dtype) ** 4
    return torch.randn(count, generator=generator, dtype=dtype) * spread


def coded(codec, x):
    """The payload, which must fill its bytes and touch no other; 8 bytes are before and behind it."""
    size = codec.size(x.numel())
    buffer = torch.full((8 + size + 8,), GUARD, dtype=torch.uint8)
    given = x.clone()
    codec.encode(x, buffer[8 : 8 + size])
    assert torch.equal(x.nan_to_num(), given.nan_to_num())  # x is left as it is
    assert bytes(buffer[:8].tolist() + buffer[8 + size :].tolist()) == bytes([GUARD] * 16)
    again = torch.zeros(size, dtype=torch.uint8)
    codec.encode(x, again)
    assert torch.equal(again, buffer[8 : 8 + size])  # and every byte is written, always the same
    return again


def decoded(codec, payload, count, dtype=torch.float32):
    out, again = torch.full((count,), 7.0, dtype=dtype), torch.full((count,), -3.0, dtype=dtype)
    codec.decode(payload, out)
    codec.decode(payload, again)
    assert torch.equal(out.view(torch.uint8), again.view(torch.uint8))
    return out


def there_and_back(codec, x):
    return decoded(codec, coded(codec, x), x.numel(), x.dtype)


# -- definitions


def bits(value, form, kind):
    return struct.unpack(kind, struct.pack(form, value))[0]


def as_bf16(x):
    """The upper half of a float32's bits, rounded to nearest, ties to even."""
    word = bits(x, "<f", "<I")
    upper, lower = word >> 16, word & 0xFFFF
    upper += lower > 0x8000 or (lower == 0x8000 and upper & 1)
    return struct.unpack("<f", struct.pack("<I", upper << 16))[0]


def as_fp16(values):
    """Python's own float16, of values that a power of two brings below 2^15."""
    scale = 2.0 ** (15 - math.frexp(max(map(abs, values)))[1])
    return [struct.unpack("<e", struct.pack("<e", v * scale))[0] / scale for v in values]


def as_int8(values):
    found = []
    for start in range(0, len(values), 256):
        block = values[start : start + 256]
        scale = max(map(abs, block)) / 127
        found += [round(v / scale) * scale for v in block]
    return found


def as_onebit(values):
    found = []
    for start in range(0, len(values), OneBit.align):
        block = values[start : start + OneBit.align]
        mean = sum(map(abs, block)) / len(block)
        found += [math.copysign(mean, v) for v in block]
    return found


def as_topk(values, k):
    order = sorted(range(len(values)), key=lambda i: -abs(values[i]))[:k]
    return [v if i in order else 0.0 for i, v in enumerate(values)]


@types
@pytest.mark.parametrize("count", [1, 7, 8, 257, 3000])
def test_codecs_equal_their_definitions(dtype, count):
    x = normal(count, torch.float32, seed=count).to(dtype)
    values = x.tolist()
    wanted = {
        "plain": values,
        "bf16": [as_bf16(v) for v in values],
        "fp16": as_fp16(values),
        "int8": as_int8(values),
        "onebit": as_onebit(values),
        "topk": as_topk(values, -(-count // 10)),
        "topk of everything": values,
    }
    for name, expected in wanted.items():
        found, expected = there_and_back(ALL[name](dtype), x), torch.tensor(expected, dtype=dtype)
        if name in ("int8", "onebit"):  # scales in float32
            torch.testing.assert_close(found, expected, rtol=2e-6, atol=0)
        else:
            assert torch.equal(found, expected), name


@pytest.mark.parametrize("count", COUNTS)
def test_sizes_are_as_documented(count):
    blocks, thousands = math.ceil(count / 256), math.ceil(count / OneBit.align)
    assert Plain(torch.float32).size(count) == 4 * count
    assert Plain(torch.float64).size(count) == 8 * count
    assert Bf16().size(count) == 2 * count
    assert Fp16().size(count) == (4 + 2 * count if count else 0)
    assert Int8().size(count) == 4 * blocks + count
    assert OneBit().size(count) == 4 * thousands + math.ceil(count / 8)
    assert TopK(0.01).size(count) == 8 * (max(1, math.ceil(count / 100)) if count else 0)
    assert TopK(1.0).size(count) == 8 * count


@each
@types
@pytest.mark.parametrize("count", COUNTS)
def test_every_length_comes_back(name, dtype, count):
    x = normal(count, dtype)
    found = there_and_back(ALL[name](dtype), x)
    assert (found.dtype, found.shape) == (dtype, x.shape)
    assert found.isfinite().all()
    assert not count or (x - found).norm() < x.norm()


@each
@types
def test_zeros_are_zeros(name, dtype):
    assert not there_and_back(ALL[name](dtype), torch.zeros(300, dtype=dtype)).any()


@lossy
def test_what_has_been_decoded_is_coded_without_a_further_loss(name):
    codec = ALL[name](torch.float32)
    once = there_and_back(codec, normal(3000))
    torch.testing.assert_close(there_and_back(codec, once), once, rtol=1e-6, atol=0)


# -- bounds


def blocks(x, size):
    return zip(x.split(size), range(0, x.numel(), size), strict=False)


@types
def test_bf16_and_fp16_lose_the_last_bits_only(dtype):
    x = normal(5000, dtype) * 1e-6
    assert ((x - there_and_back(Bf16(), x)).abs() <= 2.0**-8 * x.abs()).all()
    most = x.abs().max()
    allowed = torch.where(x.abs() > 2.0**-28 * most, 2.0**-11 * x.abs(), 2.0**-39 * most)
    assert ((x - there_and_back(Fp16(), x)).abs() <= allowed).all()


@pytest.mark.parametrize("factor", [2.0**-149, 1e-38, 1e-20, 1.0, 65504.0, 1e30, 1e38])
def test_fp16_neither_overflows_nor_underflows(factor):
    x = torch.linspace(-3, 3, 101) * factor
    found = there_and_back(Fp16(), x)
    assert found.isfinite().all()
    assert ((x - found).abs() <= 2.0**-11 * x.abs()).all()


@types
def test_int8_loses_at_most_half_a_step(dtype):
    x = normal(5000, dtype)
    lost = (x - there_and_back(Int8(), x)).abs()
    for block, start in blocks(x, 256):
        assert lost[start : start + 256].max() <= block.abs().max() / 254 * (1 + 1e-5)
        assert lost[start : start + 256].square().sum() <= 256 / 254**2 * block.square().sum() * (1 + 1e-5)


@types
def test_onebit_contracts_as_much_as_its_input_is_dense(dtype):
    x = normal(5000, dtype)
    lost = x - there_and_back(OneBit(), x)
    for block, start in blocks(x, OneBit.align):
        squares = block.square().sum()
        delta = block.abs().sum() ** 2 / (block.numel() * squares)
        found = lost[start : start + block.numel()].square().sum()
        torch.testing.assert_close(found, (1 - delta) * squares, rtol=1e-5, atol=0)


@types
@pytest.mark.parametrize("ratio", [1e-9, 0.01, 0.1, 0.5, 1.0])
def test_topk_contracts(dtype, ratio):
    x = normal(5000, dtype)
    found, k = there_and_back(TopK(ratio), x), max(1, math.ceil(ratio * 5000))
    assert found.count_nonzero() == k
    assert (x - found).square().sum() <= (1 - k / 5000) * x.square().sum() + 1e-12


@settings(max_examples=60)
@given(st.integers(0, 10_000), st.integers(1, 30_000), st.floats(0, 0.3), st.floats(0, 1), st.booleans())
def test_a_guessed_threshold_finds_the_largest_exactly(seed, count, share, zeros, rounded):
    """Whatever the guess: too high, too low, with many equal elements, most of them zero, in runs."""
    generator = torch.Generator().manual_seed(seed)
    magnitudes = torch.randn(count, generator=generator).abs()
    magnitudes[: int(zeros * count)] = 0
    if rounded:
        magnitudes.round_()
    k = max(1, int(share * count))
    found = largest(magnitudes, k)
    assert found.unique().numel() == k
    assert torch.equal(magnitudes[found].sort().values, magnitudes.sort().values[-k:])


def test_a_threshold_saves_ranking_everything():
    """The guess serves on ordinary values, also on a matrix of which one column matters."""
    matrix = torch.randn(400, 256).abs() * 1e-3
    matrix[:, 17] += 1.0
    for magnitudes in (normal(100_000).abs(), matrix.flatten()):
        ranked: list[int] = []
        largest(magnitudes.as_subclass(watched(ranked)), magnitudes.numel() // 300)
        assert len(ranked) == 2
        assert max(ranked) < magnitudes.numel() / 20


def watched(ranked):
    """A kind of tensor that notes how many elements topk ranks."""

    class Watched(torch.Tensor):
        def topk(self, k, **kwargs):
            ranked.append(self.numel())
            return super().topk(k, **kwargs)

    return Watched


# -- what is far out


@each
@types
def test_one_huge_element_stays_finite(name, dtype):
    x = normal(600, dtype)
    x[300] = 1e30
    found = there_and_back(ALL[name](dtype), x)
    assert found.isfinite().all()
    if name == "int8":  # the others of its block are lost, other blocks are not
        torch.testing.assert_close(found[300].item(), 1e30, rtol=1e-6, atol=0)
        assert not found[256:300].any()
        assert found[:256].count_nonzero() > 100
    elif name != "onebit":
        torch.testing.assert_close(found[300].item(), 1e30, rtol=2.0**-8, atol=0)


@each
@types
def test_denormals_come_back_as_small_numbers(name, dtype):
    x = normal(600, dtype) * 1e-42
    found = there_and_back(ALL[name](dtype), x)
    assert found.isfinite().all()
    assert found.abs().max() <= 2 * x.abs().max()


@each
@types
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("count", [1, 7, 300, 5000])
def test_what_is_not_finite_does_not_look_finite(name, dtype, value, count):
    for place in {0, count // 2, count - 1}:
        x = normal(count, dtype)
        x[place] = value
        assert not there_and_back(ALL[name](dtype), x).isfinite().all()
    x = torch.full((count,), value, dtype=dtype)
    assert not there_and_back(ALL[name](dtype), x).isfinite().all()


@types
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_costs_its_block_only(dtype, value):
    x = normal(5000, dtype)
    x[4000] = value
    for codec in (Int8(), OneBit()):
        wrong = (~there_and_back(codec, x).isfinite()).nonzero()
        assert wrong.min() >= 4000 // codec.align * codec.align
        assert wrong.max() < (4000 // codec.align + 1) * codec.align


def test_indices_of_many_nan_are_in_range():
    x = torch.full((5000,), math.nan)
    payload = coded(TopK(0.1), x)
    indices = payload[4 * 500 :].view(torch.int32)
    assert indices.unique().numel() == 500
    assert set(indices.tolist()) <= set(range(5000))


class Allocations(TorchDispatchMode):
    """The most bytes that results of operations held at any time, but for tensors that were there before."""

    def __init__(self, *before):
        super().__init__()
        self.before = {tensor.untyped_storage()._cdata for tensor in before}
        self.held, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            storage = tensor.untyped_storage()
            if storage._cdata not in self.before:
                self.held[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.held = {key: held for key, held in self.held.items() if not held[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self.held.values()))
        return result


@each
@types
def test_temporaries_are_at_most_twice_the_input(name, dtype):
    x = normal(50_000, dtype)
    codec = ALL[name](dtype)
    payload, out = torch.empty(codec.size(x.numel()), dtype=torch.uint8), torch.empty_like(x)
    with Allocations(x, payload) as encoding:
        codec.encode(x, payload)
    with Allocations(payload, out) as decoding:
        codec.decode(payload, out)
    # what selects everything has an index for each element, in int64
    allowed = 2 if name != "topk of everything" else 5
    assert encoding.peak <= allowed * x.nbytes
    assert decoding.peak <= 2 * x.nbytes
    if name in ("int8", "onebit", "topk"):
        assert encoding.peak > 0.9 * x.nbytes  # the magnitudes are counted
