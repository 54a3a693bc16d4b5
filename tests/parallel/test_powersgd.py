"""PowerSGD against its paper, and against everything that a gradient can be.

torch's own hook is no peer to compare with here: DDP with its PowerSGD hook and several buckets ends with SIGABRT on
gloo.
"""

from itertools import pairwise

import powersgd_functions
import pytest
import torch
from powersgd_functions import Ranks, normal, paper

from mmlab.parallel.compression.powersgd import Matrix, PowerSgd, drawn, parted
from mmlab.parallel.compression.sums import make_sum
from mmlab.plan.schema import GroupCommunication


def close(found, wanted, tolerance=1e-12):
    assert ((found - wanted).norm() <= tolerance * wanted.norm()).item()


def test_steps_are_those_of_the_paper():
    shapes = {"w": (20, 12), "b": (7,), "v": (6, 30)}
    ranks = Ranks(shapes, 3, rank=2)
    errors = {name: [torch.zeros(shapes[name], dtype=torch.float64)] * 3 for name in ("w", "v")}
    q = {
        name: drawn(Matrix(name, 0, *shapes[name], 2), 0, torch.zeros(1, dtype=torch.float64)).T for name in ("w", "v")
    }
    for step in range(4):
        gradients = [normal(rank, step, 20 * 12 + 7 + 6 * 30) for rank in range(3)]
        reduced = ranks.step(gradients)
        for name, run in (("w", slice(0, 240)), ("v", slice(247, 427))):
            own = [g[run].view(shapes[name]) for g in gradients]
            wanted, errors[name], q[name] = paper(own, errors[name], q[name])
            close(reduced[run].view(shapes[name]), wanted, 1e-10)
            for packed, error in zip(ranks.packed, errors[name], strict=True):
                close(packed.kept.residual[run].view(shapes[name]), error, 1e-10)
        close(reduced[240:247], sum(g[240:247] for g in gradients))
        assert not any(packed.kept.residual[240:247].any() for packed in ranks.packed)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("shape", [(9, 4), (4, 9), (6, 6), (36, 1), (1, 36), (3, 3, 2, 2)])
def test_a_rank_that_leaves_nothing_out_gives_the_dense_sum(shape, dtype, tolerance):
    ranks = Ranks({"w": shape}, 2, dtype, rank=16, min_compression_rate=0.0)
    [matrix] = parted(ranks.packed[0].shapes, ranks.settings)[0]
    assert matrix.rank == min(matrix.rows, matrix.columns)
    for step in range(3):
        gradients = [normal(rank, step, *shape).flatten().to(dtype) for rank in range(2)]
        close(ranks.step(gradients), sum(gradients), tolerance)
        assert ranks.residuals().norm() <= tolerance * sum(gradients).norm()


@pytest.mark.parametrize("unit", [1.0, 1024.0])
def test_nothing_is_lost_but_for_rounding(unit):
    ranks = Ranks({"a": (16, 24), "b": (5,), "c": (4, 3, 3, 3), "d": (2, 50)}, 2, rank=1)
    ranks.unit = unit
    went_in = came_out = torch.zeros_like(ranks.packed[0].flat)
    for step in range(6):
        gradients = [normal(rank, step, went_in.numel()) for rank in range(2)]
        went_in = went_in + sum(gradients)
        came_out = came_out + ranks.step(gradients)
        close(came_out + ranks.residuals(), went_in)
    assert ranks.residuals().norm() > 0.1 * went_in.norm()


def spread(rows: int, columns: int, seed: int = 5) -> torch.Tensor:
    """A matrix with singular values 1, 0.7, 0.49, ..."""
    u, _ = torch.linalg.qr(normal(seed, 1, rows, rows))
    v, _ = torch.linalg.qr(normal(seed, 2, columns, columns))
    count = min(rows, columns)
    return u[:, :count] @ torch.diag(0.7 ** torch.arange(count, dtype=torch.float64)) @ v[:, :count].T


@pytest.mark.parametrize("rank", [1, 3])
def test_power_iteration_finds_the_best_approximation(rank):
    m = spread(30, 20)
    best = 0.7 ** torch.arange(rank, 20, dtype=torch.float64)
    best = best.square().sum().sqrt()
    ranks = Ranks({"w": (30, 20)}, 2, rank=rank, error_feedback=False)
    parts = [(m + normal(9, 9, 30, 20)).flatten(), -normal(9, 9, 30, 20).flatten()]
    errors = [(ranks.step(parts).view(30, 20) - m).norm() for _ in range(25)]
    assert errors[0] > 1.05 * best
    assert all(after <= before * (1 + 1e-12) for before, after in pairwise(errors))
    assert best * (1 - 1e-12) <= errors[-1] <= 1.000001 * best
    cold = [(ranks.step(parts, warm_start=False).view(30, 20) - m).norm() for _ in range(25)]
    assert min(cold) > 1.01 * best  # a new start in each step never gets there


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_gradient_of_low_rank_comes_through_whole(dtype):
    """Factors with more columns than the gradient has directions: the rest is rounding, and must not be sent twice."""
    ranks = Ranks({"w": (40, 30)}, 2, dtype, rank=4)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    for step in range(6):
        gradients = [(normal(rank, step, 40, 1) @ normal(7, 7, 1, 30)).flatten().to(dtype) for rank in range(2)]
        if step:  # the start has met the one direction by then, but for rounding
            close(ranks.step(gradients), sum(gradients), tolerance)
            assert ranks.residuals().norm() <= tolerance * sum(gradients).norm()
        else:
            ranks.step(gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_zero_gradients_do_not_end_the_iteration(dtype):
    """Rows of zeros at the top too: where P is zero, QR answers with the first unit vectors."""
    ranks = Ranks({"w": (30, 20)}, 2, dtype, rank=3, error_feedback=False)
    m = spread(24, 20).to(dtype)
    m = torch.cat([torch.zeros(6, 20, dtype=dtype), m])
    for step in range(4):
        reduced = ranks.step([torch.zeros(600, dtype=dtype)] * 2)
        assert torch.equal(reduced, torch.zeros_like(reduced)), step
    assert (ranks.factors("w").abs().amax(1) > 0).all()
    best = (0.7 ** torch.arange(3, 20, dtype=torch.float64)).square().sum().sqrt()
    for _ in range(20):
        reduced = ranks.step([m.flatten() / 2] * 2)
    assert (reduced.view(30, 20) - m).norm() <= 1.0001 * best


def test_ranks_that_cancel_send_nothing_and_keep_nothing_wrong():
    ranks = Ranks({"w": (30, 20)}, 2, rank=3)
    one = normal(0, 0, 600)
    for _ in range(3):
        reduced = ranks.step([one, -one])
        assert reduced.norm() <= 1e-12 * one.norm()
        assert ranks.residuals().norm() <= 1e-12 * one.norm()
    close(ranks.step([one, one]) + ranks.residuals(), 2 * one)


@pytest.mark.parametrize("scale", [1e-36, 1e-25, 1e25, 1e33])
def test_gradients_of_any_size_stay_in_range(scale):
    ranks = Ranks({"w": (30, 20)}, 2, torch.float32, rank=3, error_feedback=False)
    m = (spread(30, 20) * scale).float()
    best = (0.7 ** torch.arange(3, 20, dtype=torch.float64)).square().sum().sqrt() * scale
    for _ in range(20):
        reduced = ranks.step([m.flatten() / 2] * 2)
    assert (reduced.view(30, 20).double() - m.double()).norm() <= 1.001 * best


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", ["w", "b"])
def test_what_is_not_finite_reaches_every_rank_and_no_state(value, place):
    ranks = Ranks({"w": (16, 12), "v": (16, 10), "b": (5,)}, 2, torch.float32, rank=2)
    good = [normal(rank, 0, 16 * 22 + 5).float() for rank in range(2)]
    ranks.step(good)
    before = ranks.factors("w")
    bad = good[1].clone()
    bad[3 if place == "w" else -2] = value
    reduced = ranks.step([good[0], bad])
    hit = slice(0, 16 * 12) if place == "w" else slice(16 * 22, None)
    assert not reduced[hit].isfinite().all()
    others = torch.ones_like(reduced, dtype=torch.bool)
    others[hit] = False
    assert reduced[others].isfinite().all()  # said where it is
    for packed in ranks.packed:
        assert packed.kept.residual.isfinite().all()
        assert all(factor.isfinite().all() for factor in packed.kept.factors.values())
    assert torch.equal(ranks.factors("w"), before) == (place == "w")
    left = ranks.residuals()
    close(ranks.step(good) + ranks.residuals(), sum(good) + left, 1e-5)


def test_a_step_can_be_taken_back():
    ranks = Ranks({"w": (16, 12)}, 2, rank=2, undoable=True)
    ranks.step([normal(rank, 0, 192) for rank in range(2)])
    residuals, q = [p.kept.residual.clone() for p in ranks.packed], ranks.factors("w").clone()
    ranks.step([torch.full((192,), torch.inf, dtype=torch.float64)] * 2)
    for packed in ranks.packed:
        packed.kept.undo()
    assert all(torch.equal(p.kept.residual, r) for p, r in zip(ranks.packed, residuals, strict=True))
    assert torch.equal(ranks.factors("w"), q)


@pytest.mark.parametrize("warm_start", [True, False])
def test_a_restored_run_goes_on_with_the_same_bits(warm_start):
    shapes = {"w": (16, 12), "b": (4,)}
    ranks, again = (Ranks(shapes, 2, rank=2, warm_start=warm_start) for _ in range(2))
    for step in range(3):
        ranks.step([normal(rank, step, 196) for rank in range(2)])
    for packed, copy in zip(ranks.packed, again.packed, strict=True):
        copy.kept.residual = packed.kept.residual.clone()
        copy.kept.factors = {name: factor.clone() for name, factor in packed.kept.factors.items()}
    for step in range(3, 6):
        gradients = [normal(rank, step, 196) for rank in range(2)]
        assert torch.equal(ranks.step(gradients), again.step(gradients))


def test_without_warm_start_every_step_has_a_draw_of_its_own():
    m = [normal(rank, 0, 192) for rank in range(2)]
    ranks = Ranks({"w": (16, 12)}, 2, rank=2, warm_start=False, error_feedback=False)
    found = [ranks.step(m) for _ in range(3)]
    assert not torch.equal(found[0], found[1])
    assert not torch.equal(found[1], found[2])
    assert ranks.factors("w").tolist() == 3
    warm = ranks.step(m, warm_start=True)  # what stands in the place of Q is none
    assert torch.equal(warm, found[0])
    assert ranks.factors("w").shape == (2, 12)


def test_settings_may_change_between_steps():
    """Another rank, another rate: what no longer fits is begun anew, what has no factors any more keeps none."""
    ranks = Ranks({"w": (16, 12), "v": (6, 5)}, 2, rank=1)
    went_in = came_out = torch.zeros(222, dtype=torch.float64)
    for step, changed in enumerate([{}, {"rank": 3}, {"min_compression_rate": 100.0}, {"min_compression_rate": 1.0}]):
        gradients = [normal(rank, step, 222) for rank in range(2)]
        went_in, came_out = went_in + sum(gradients), came_out + ranks.step(gradients, **changed)
        close(came_out + ranks.residuals(), went_in)
        held = {name: tuple(q.shape) for name, q in ranks.packed[0].kept.factors.items()}
        assert held == [{"w": (1, 12), "v": (1, 5)}, {"w": (3, 12)}, {}, {"w": (3, 12)}][step]


def test_what_was_left_out_is_flushed_kept_or_dropped_without_error_feedback():
    for policy in ("flush", "keep", "drop"):
        ranks = Ranks({"w": (16, 12)}, 2, rank=2)
        ranks.step([normal(rank, 0, 192) for rank in range(2)])
        left, zeros = ranks.residuals().clone(), [torch.zeros(192, dtype=torch.float64)] * 2
        reduced = ranks.step(zeros, error_feedback=False, residual=policy)
        assert bool(reduced.norm() > 0.1 * left.norm()) == (policy == "flush")
        kept = ranks.packed[0].kept.residual
        assert (kept is not None) == (policy == "keep")


def test_matrices_pay_or_go_as_they_are():
    shapes = {"a": (8, 8), "b": (64,), "c": (), "d": (16, 4, 2, 2), "e": (100, 1), "f": (1, 100), "g": (64, 16)}
    sizes = {name: torch.Size(shape) for name, shape in shapes.items()}

    def split(rank, rate):
        settings = GroupCommunication(compressor="powersgd", rank=rank, min_compression_rate=rate)
        matrices, dense = parted(sizes, settings)
        covered = sum(m.rows * m.columns for m in matrices) + sum(run.stop - run.start for run in dense)
        assert covered == sum(size.numel() for size in sizes.values())
        return {m.name: (m.offset, m.rows, m.columns, m.rank) for m in matrices}, dense

    # 8 x 8 has 64 elements and factors of 16, four times fewer; 16 x 16 eight times fewer; 64 x 16 12.8 times
    assert split(1, 4.0)[0] == {"a": (0, 8, 8, 1), "d": (129, 16, 16, 1), "g": (585, 64, 16, 1)}
    assert split(1, 4.1)[0] == {"d": (129, 16, 16, 1), "g": (585, 64, 16, 1)}
    assert split(1, 4.1)[1] == [slice(0, 129), slice(385, 585)]
    assert split(2, 5.0)[0] == {"g": (585, 64, 16, 2)}
    assert split(16, 1.0)[0] == {}


def test_the_start_is_known_by_name_and_draw():
    torch.manual_seed(3)
    like = torch.zeros(1)
    one = drawn(Matrix("language.a", 7, 3, 5, 2), 0, like)
    torch.manual_seed(4)
    assert torch.equal(drawn(Matrix("language.a", 0, 9, 5, 2), 0, like), one)
    assert not torch.equal(drawn(Matrix("language.b", 0, 9, 5, 2), 0, like), one)
    assert not torch.equal(drawn(Matrix("language.a", 0, 9, 5, 2), 1, like), one)
    assert torch.equal(drawn(Matrix("language.a", 0, 9, 5, 2), 0, like.double()), one.double())


def test_the_plan_names_it():
    found = make_sum(GroupCommunication(compressor="powersgd", rank=7))
    assert isinstance(found, PowerSgd)
    assert found.settings.rank == 7


@pytest.mark.parametrize("world", [2, 4])
def test_many_buckets_have_equal_bits_on_all_ranks_and_both_backends(pool, world):
    pool.grow(world)
    steps = 3
    results = pool.run(powersgd_functions.many_buckets, ["gloo", "shm"], steps, ranks=world)
    first = results[0]["gloo"]
    went_in = came_out = 0.0
    for result in results:
        for found in result.values():
            assert all(torch.equal(a, b) for a, b in zip(found["grads"], first["grads"], strict=True))
            assert found["bytes"] == found["predicted"]
            assert torch.equal(found["drawn"], drawn(Matrix("p0", 0, 24, 16, 3), 0, torch.zeros(1)))
        both = zip(result["gloo"]["residuals"], result["shm"]["residuals"], strict=True)
        assert all(torch.equal(a, b) for a, b in both)
    sizes = [torch.Size(powersgd_functions.SHAPES[i % 5]) for i in range(40)]
    for step in range(steps):
        went_in = went_in + sum(
            torch.cat([normal(rank + 10 * i, step, *size).float().flatten() for i, size in enumerate(sizes)])
            for rank in range(world)
        )
        came_out = came_out + first["grads"][step]
        left = sum(result["gloo"]["residuals"][step] for result in results)
        close(came_out + left, went_in, 1e-5)
        assert left.norm() > 0.1 * went_in.norm()
