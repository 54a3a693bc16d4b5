"""Gradients in buckets that start inside backward: exact, in one order on every rank, measured."""

from types import SimpleNamespace

import gradient_functions
import pytest
import torch
from gradient_functions import MODULES, Trained, chain, trained_of

from mmlab.parallel import gradients
from mmlab.parallel.compression.feedback import Kept
from mmlab.parallel.gradients import Reducer
from mmlab.parallel.scatter import Rows, ScatterSums, Unit


@pytest.mark.parametrize("backend", ["gloo", "shm"])
@pytest.mark.parametrize("imageless", [False, True])
def test_buckets_sum_over_ranks_and_microbatches(pool, backend, imageless):
    results = pool.run(gradient_functions.steps, backend, imageless, ranks=2)
    for result in results:
        for found, wanted in zip(result["grads"], gradient_functions.expected(2, imageless), strict=True):
            for name, grad in found.items():
                torch.testing.assert_close(grad, wanted[name], rtol=1e-12, atol=1e-14)
        # six buckets of one matrix of 8 x 8 float64, reduced once a step whatever the number of microbatches
        assert result["calls"] | {"tp": 0} == result["calls"]
        assert {m: result["calls"][m] for m in MODULES} == dict.fromkeys(MODULES, 6)
        assert {m: result["bytes"][m] for m in MODULES} == dict.fromkeys(MODULES, 6 * 8 * 8 * 8)
    # the last backward has filled all buckets, on the rank without images those before the first it lacks
    assert results[1]["inside"] == [6, 6, 6]
    assert results[0]["inside"] == ([4, 4, 4] if imageless else [6, 6, 6])


def test_every_rank_starts_the_same_buckets_in_the_same_order(pool):
    pool.grow(3)
    orders = pool.run(gradient_functions.call_order, ranks=3)
    assert orders == [[6, 5, 4, 3, 2, 1]] * 3


def test_partial_gradients_are_summed_over_the_tensor_group_too(pool):
    pool.grow(4)
    results = pool.run(gradient_functions.partial, ranks=4)
    for rank, grads in enumerate(results):
        own = [101.0, 1010.0][rank % 2]  # 10^rank, summed over the ranks of the data-parallel group
        assert grads == {"p0": [own] * 3, "p1": [1111.0] * 3, "p2": [own] * 3}


class Scripted:
    """A reduction that takes `needs` seconds of a clock that stands still but for what the test does."""

    def __init__(self, clock, needs):
        self.clock, self.ends, self.future = clock, clock[0] + needs, torch.futures.Future()

    def get_future(self):
        return self.future

    def wait(self):
        self.clock[0] = max(self.clock[0], self.ends)
        self.end()

    def end(self):
        if not self.future.done():
            self.future.set_result(None)


@pytest.mark.parametrize(("pause", "seconds", "exposed"), [(0.0, 3.0, 3.0), (2.0, 3.0, 1.0), (5.0, 3.0, 0.0)])
def test_time_under_way_and_time_waited_are_told_apart(monkeypatch, pause, seconds, exposed):
    clock, started = [100.0], []
    monkeypatch.setattr(gradients.time, "perf_counter", lambda: clock[0])
    parameters = chain(3, 4)
    reducer = Reducer(trained_of(parameters), {}, dict.fromkeys(MODULES, 1e6))

    class Sum:
        def rounds(self, packed, wire, unit):
            started.append(Scripted(clock, 3.0))
            yield started[-1]

    reducer.wires["language"] = object()  # nothing is sent
    reducer.sums["language"] = Sum()
    reducer.arm(["p2"])
    gradient_functions.forward(parameters, torch.ones(1, 4, dtype=torch.float64)).backward()
    while clock[0] < 100.0 + pause:  # other work, during which the reduction ends
        clock[0] += 1.0
        if clock[0] >= started[0].ends:
            started[0].end()
    reducer.finish()
    assert reducer.overlap["language"] == gradients.Overlap(seconds, exposed)
    assert reducer.overlap["vision"] == gradients.Overlap(0.0, 0.0)  # it has nobody to talk to


def test_a_bucket_is_under_way_until_its_last_round_ends(monkeypatch):
    """On a device nothing but the wait tells when a round has ended."""
    clock = [100.0]
    monkeypatch.setattr(gradients.time, "perf_counter", lambda: clock[0])
    parameters = chain(3, 4)
    reducer = Reducer(trained_of(parameters), {}, dict.fromkeys(MODULES, 1e6))

    class Untold(Scripted):
        def end(self):
            pass

    class Sum:
        def rounds(self, packed, wire, unit):
            for _ in range(2):
                yield Untold(clock, 3.0)

    reducer.wires["language"] = object()  # nothing is sent
    reducer.sums["language"] = Sum()
    reducer.finish()
    assert reducer.overlap["language"] == gradients.Overlap(6.0, 6.0)


@pytest.fixture
def unit():
    """Five rows of 2 and three of 4 for three ranks, the first one's: two rows of padding in all."""
    members = []
    for name, shape in (("language.a", (5, 2)), ("language.b", (3, 4))):
        rows = torch.zeros(-(-shape[0] // 3), *shape[1:])
        trained = Trained(name, torch.nn.Parameter(rows), rows, "language", True, sharded=True)
        members.append((trained, torch.Size(shape)))
    return Unit(Rows(3, members), Kept(), False)


def test_padding_of_sharded_rows_is_cleared_and_nothing_else(unit):
    flat = torch.ones(unit.numel)
    unit.clear_padding(flat)
    assert flat.view(3, 8).tolist() == [[1.0] * 8, [1.0] * 8, [1.0] * 2 + [0.0] * 2 + [1.0] * 4]
    again = unit.residual()
    for name, part in unit.parts(flat):
        unit.put(again, name, part)
    assert torch.equal(again, flat)


def test_residuals_of_sharded_rows_are_measured_where_they_are(unit, monkeypatch):
    sums = ScatterSums(SimpleNamespace(ranks=3, rank=0), False, False)
    sums.units.append(unit)
    reducer = Reducer(unit.members, {}, dict.fromkeys(MODULES, 1e6), sharded={"language": sums})
    unit.kept.residual = torch.arange(unit.numel, dtype=torch.float32)
    unit.clear_padding(unit.kept.residual)
    measured, norms = [], gradients.squared_norms

    def spy(modules, grads):
        found = list(grads)
        measured.extend(value for _, value in found)
        return norms(modules, found)

    monkeypatch.setattr(gradients, "squared_norms", spy)
    reducer.finish()
    assert reducer.coding["language"].residual == pytest.approx(float(unit.kept.residual.square().sum()))
    assert {v.untyped_storage().data_ptr() for v in measured} == {unit.kept.residual.untyped_storage().data_ptr()}


@pytest.mark.parametrize(
    ("spans", "length"), [([], 0), ([(1, 3)], 2), ([(1, 3), (2, 5), (7, 8)], 5), ([(0, 9), (1, 2), (3, 4)], 9)]
)
def test_buckets_under_way_at_the_same_time_count_once(spans, length):
    assert gradients.covered(spans) == length


def test_a_gradient_that_is_not_the_last_one_starts_nothing():
    parameters = chain(3, 4)
    reducer = Reducer(trained_of(parameters), {}, dict.fromkeys(MODULES, 1.0))
    gradient_functions.forward(parameters, torch.ones(1, 4, dtype=torch.float64)).backward()
    assert all(p.grad is not None for p in parameters)
    reducer.arm(["p2"])
    gradient_functions.forward(parameters, torch.ones(1, 4, dtype=torch.float64)).backward()
    assert [p.grad is None for p in parameters] == [False, False, True]
    reducer.finish()
    assert [p.grad for p in parameters] == [None] * 3
    gradient_functions.forward(parameters, torch.ones(1, 4, dtype=torch.float64)).backward()
    assert all(p.grad is not None for p in parameters)  # armed for one step only


def test_buckets_are_bounded_and_of_one_dtype():
    parameters = [
        torch.nn.Parameter(torch.zeros(n, dtype=d)) for n, d in [(4, torch.float32)] * 3 + [(9, torch.float64)]
    ]
    trained = [Trained(f"p{i}", p, p.detach(), "language", True) for i, p in enumerate(parameters)]
    reducer = Reducer(trained, {}, dict.fromkeys(MODULES, 32.0))
    assert [[t.name for t in bucket.members] for bucket in reducer.buckets] == [["p3"], ["p2", "p1"], ["p0"]]
    reducer.scale(0.5)
    assert reducer.squared_norms(MODULES).tolist() == [0.0, 0.0, 0.0]
