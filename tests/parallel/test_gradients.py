"""Gradients in buckets that start inside backward: exact, in one order on every rank, measured."""

import gradient_functions
import pytest
import torch
from gradient_functions import MODULES, Trained, chain, trained_of

from mmlab.parallel import gradients
from mmlab.parallel.gradients import Reducer


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
