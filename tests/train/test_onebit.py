"""1-bit Adam: the paper's formula, what is sent, and runs that are restored after the freeze."""

import kept_functions
import onebit_functions as ranks
import pytest
import torch
from live import LiveRun, make_plan
from onebit_functions import FREEZE, STEPS, Ranked, gradients

from mmlab.plan import Plan
from mmlab.train.optim import learning_rates


def by_the_formula(plan, world):
    """Weights, what was reduced and first moments of each step, from all ranks' gradients at once, by no optimizer."""
    found = []
    w = ranks.weights()
    m = {name: torch.zeros_like(value) for name, value in w.items()}
    v = {name: torch.zeros_like(value) for name, value in w.items()}
    for step in range(1, STEPS + 1):
        g = {name: sum(gradients(step, rank)[name] for rank in range(world)) for name in w}
        rates = learning_rates(plan, step)
        for name in w:
            own = getattr(plan.train, name.partition(".")[0])
            m[name] = own.beta1 * m[name] + (1 - own.beta1) * g[name]
            if step <= FREEZE:
                v[name] = own.beta2 * v[name] + (1 - own.beta2) * g[name] ** 2
            root = (v[name] / (1 - own.beta2 ** min(step, FREEZE))).sqrt()
            step_ = m[name] / (1 - own.beta1**step) / (root + own.eps)
            step_[v[name] == 0] = 0.0
            decay = own.weight_decay if w[name].dim() == 2 else 0.0
            w[name] = w[name] - rates[name.partition(".")[0]] * (step_ + decay * w[name])
        found.append((dict(w), g if step <= FREEZE else dict(m), dict(m)))
    return found


def assert_close(found, wanted):
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-11, atol=1e-13)


def test_one_rank_follows_the_formula():
    plan = ranks.make_plan(parallel__dp=1)
    made = Ranked(plan, None)
    for step, (weights, reduced, _) in enumerate(by_the_formula(plan, 1), start=1):
        assert_close(made.reduce(step, gradients(step, 0)), reduced)
        assert_close(made.update(step), weights)


@pytest.mark.parametrize("scaled", [1.0, 1024.0])
def test_ranks_sum_shares_of_the_first_moment(pool, scaled):
    """Also with a loss scale: shares are in its unit, and what is applied is not."""
    plan = ranks.make_plan()
    results = pool.run(ranks.trajectory, plan.dumps(), "gloo", torch.float64, scaled, ranks=2)
    for result in results:
        for step, (weights, reduced, _) in enumerate(by_the_formula(plan, 2)):
            assert_close(result["reduced"][step], reduced)
            assert_close(result["weights"][step], weights)


@pytest.mark.parametrize("backend", ["gloo", "shm"])
def test_compressed_shares_lose_nothing_and_leave_ranks_equal(pool, backend):
    """At every step what was reduced and all residuals together are the new first moment of what was applied before,
    and the residuals that were there; nothing is compressed before the freeze."""
    plan = ranks.make_plan(communication__language__compressor="onebit", communication__vision__compressor="int8")
    results = pool.run(ranks.trajectory, plan.dumps(), backend, torch.float32, 1.0, ranks=2)
    exact = by_the_formula(plan, 2)
    for step in range(STEPS):
        one, two = results
        for name, weight in one["weights"][step].items():
            assert torch.equal(weight, two["weights"][step][name])
            assert torch.equal(one["reduced"][step][name], two["reduced"][step][name])
            if step < FREEZE:
                torch.testing.assert_close(weight.double(), exact[step][0][name], rtol=1e-5, atol=1e-6)
                assert name not in one["residuals"][step]
                continue
            beta1 = getattr(plan.train, name.partition(".")[0]).beta1
            before = torch.zeros_like(weight) if step == FREEZE else one["residuals"][step - 1][name].clone()
            before += 0.0 if step == FREEZE else two["residuals"][step - 1][name]
            moment = exact[step - 1][2][name].float() if step == FREEZE else one["reduced"][step - 1][name]
            went_in = beta1 * moment + before
            went_in += (1 - beta1) * sum(gradients(step + 1, rank)[name].float() for rank in range(2))
            kept = one["residuals"][step][name] + two["residuals"][step][name]
            assert kept.norm() > 0.1 * went_in.norm()  # something was left out
            torch.testing.assert_close(one["reduced"][step][name] + kept, went_in, rtol=1e-4, atol=1e-5)


def test_a_step_that_is_left_out_changes_no_moment():
    """fp16 finds the overflow after the reduction: the same step again must give what it gives without it."""
    plan = ranks.make_plan(parallel__dp=1)
    made, other = Ranked(plan, None), Ranked(plan, None)
    for step in range(1, STEPS + 1):
        if step > FREEZE:
            made.reduce(step, {name: grad * torch.inf for name, grad in gradients(step, 0).items()})
        made.reduce(step, gradients(step, 0))
        other.reduce(step, gradients(step, 0))
        assert_close(made.update(step), other.update(step))


def test_a_tied_copy_adds_its_gradient_alone():
    """The first and the last stage's shares are summed afterwards: m is in one of them."""
    plan = ranks.make_plan(parallel__dp=1)
    made, copy = Ranked(plan, None), Ranked(plan, None, copies={"language.a"})
    for step in range(1, STEPS + 1):
        own, others = gradients(step, 0), gradients(step, 1)
        one, two = made.reduce(step, own), copy.reduce(step, others)
        for side in (made, copy):
            side.reducer.grads["language.a"].copy_(one["language.a"] + two["language.a"])
        if step > FREEZE:
            beta1 = plan.train.language.beta1
            assert_close({"a": two["language.a"]}, {"a": (1 - beta1) * others["language.a"]})
        assert torch.equal(made.update(step)["language.a"], copy.update(step)["language.a"])
    wanted = by_the_formula(plan, 2)[-1][0]["language.a"]
    assert_close({"a": made.params["language.a"].detach()}, {"a": wanted})


def without_evaluation(data, *changes):
    base = ("parallel.dp=2", "parallel.pp=1", "parallel.vision_dp=1", "train.eval_samples=0", "data.global_batch=8")
    onebit = ("train.optimizer=onebit_adam", "train.freeze_step=3", "train.clip_norm=0", "train.steps=7")
    return make_plan(data, *base, *onebit, *changes)


def test_a_run_is_restored_after_the_freeze(pool, shards, tmp_path):
    """Bit for bit with its residuals; events say what the norms are of; clipping is refused while the run goes on."""
    compressed = [f"communication.{side}.compressor=onebit" for side in ("vision", "language")]
    plan = without_evaluation(shards, "train.steps=1000", "parallel.vision_dp=2", *compressed)
    run = LiveRun(pool, plan, tmp_path)
    run.wait_step(4)
    run.do("pause")
    refused = run.do("set", values={"train.clip_norm": 1.0})
    assert not refused.ok
    assert "no rank knows the norm" in refused.message
    saved = run.do("checkpoint")
    for times in (1, 2):
        run.do("step", n=3)
        run.wait_for(lambda times=times: [e["step"] for e in run.events("step")].count(saved.step + 3) == times)
        if times == 1:
            assert run.do("restore", step=saved.step).ok
    run.do("stop")
    run.join()
    steps = run.events("step")
    assert [e.get("reduced") for e in steps[:5]] == [None] * 3 + ["momentum"] * 2
    first, second = steps[-6:-3], steps[-3:]
    assert [e["step"] for e in first] == [e["step"] for e in second]
    assert [(e["loss"], e["grad_norm"]) for e in first] == [(e["loss"], e["grad_norm"]) for e in second]
    left = [{m: c["residual"] for m, c in e.get("compression", {}).items()} for e in steps[:5]]
    assert left[:3] == [{}] * 3
    assert all(left[3][m] > 0 for m in ("vision", "projector", "language"))


def test_what_is_kept_of_gradients_is_dropped_at_the_freeze():
    plan = ranks.make_plan(parallel__dp=1, communication__language__residual="keep")
    made = Ranked(plan, None)
    (bucket,) = (bucket for bucket in made.reducer.buckets if bucket.module == "language")
    bucket.kept.residual = torch.ones_like(bucket.flat)
    for step in range(1, FREEZE + 2):
        made.reduce(step, gradients(step, 0))
        made.update(step)
        assert (bucket.kept.residual is not None) == (step <= FREEZE)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [("parallel.dp=1", "parallel.pp=2"), ("parallel.tp=2", "parallel.dp=1")])
def test_the_freeze_passes_between_layouts(pool, shards, tmp_path, changes):
    plan = without_evaluation(shards, "checkpoint.every_steps=5")
    run = LiveRun(pool, plan, tmp_path)
    run.join()
    before = run.losses()
    other = without_evaluation(shards, *changes)
    other.save(run.paths.plan)
    again = LiveRun(pool, other, tmp_path, generation=2, restore="latest")
    again.join()
    assert again.losses() == pytest.approx(before, rel=1e-5)
    assert again.losses() != before


@pytest.mark.slow
def test_a_module_without_second_moment_is_refused_after_the_freeze(pool, shards, tmp_path):
    frozen = without_evaluation(shards, "checkpoint.every_steps=5", "train.vision.frozen=true")
    run = LiveRun(pool, frozen, tmp_path)
    run.join()
    plan = without_evaluation(shards)
    plan.save(run.paths.plan)
    again = LiveRun(pool, plan, tmp_path, generation=2, restore="latest")
    again._thread.join(60)
    reasons = [e.get("reason", "") for e in again.events("state")]
    assert any("has no second moment of vision." in reason for reason in reasons), reasons
    plan = Plan.load(str(run.paths.plan)).with_("train.freeze_step=6")
    plan.save(run.paths.plan)
    last = LiveRun(pool, plan, tmp_path, generation=3, restore="latest")
    last.join()
    assert max(last.losses()) == 7


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [("adamw", "onebit_adam"), ("onebit_adam", "adamw")])
def test_residuals_of_gradients_are_none_of_first_moments(pool, shards, tmp_path, first, then):
    """They are in another unit, ten times apart; the same optimizer goes on with them."""
    compressed = ("communication.language.compressor=onebit", "train.freeze_step=2")
    plan = without_evaluation(shards, *compressed, f"train.optimizer={first}")
    pool.grow(3)
    saved = ("train", 3), ("held",), ("save", tmp_path / "here")
    here = pool.run(kept_functions.follow, plan.dumps(), saved, ranks=3)
    loaded = ("load", tmp_path / "here"), ("held",), ("train", 1)
    same = pool.run(kept_functions.follow, plan.dumps(), loaded, ranks=3)
    other = pool.run(kept_functions.follow, plan.with_({"train.optimizer": then}).dumps(), loaded, ranks=3)
    for (_, (left,), _), (_, (found,), _), (losses, (dropped,), _) in zip(here, same, other, strict=True):
        assert [name for name, *_ in left] == [name for name, *_ in found]
        assert dropped == []
        assert losses[-1] < 10
    assert here[1][1][0]


@pytest.mark.slow
def test_residuals_of_gradients_restored_before_the_freeze_do_not_pass_it(pool, shards, tmp_path):
    """Kept since adamw through the steps without compression, they would be ten times too large for first moments."""
    compressed = "communication.language.compressor=onebit", "communication.language.residual=keep"
    adamw = without_evaluation(shards, *compressed, "train.freeze_step=4", "train.optimizer=adamw")
    pool.grow(3)
    saved = ("train", 3), ("save", tmp_path / "here")
    pool.run(kept_functions.follow, adamw.dumps(), saved, ranks=3)
    plan = adamw.with_({"train.optimizer": "onebit_adam"})
    again = ("load", tmp_path / "here"), ("train", 1), ("held",), ("train", 2)
    kept = pool.run(kept_functions.follow, plan.dumps(), again, ranks=3)
    plan = plan.with_({"communication.language.residual": "drop"})
    dropped = pool.run(kept_functions.follow, plan.dumps(), again, ranks=3)
    assert any(held for _, (held,), _ in kept)
    for (losses, _, weights), (others, (held,), same) in zip(kept, dropped, strict=True):
        assert not held
        assert losses == others
        assert all(torch.equal(value, same[name]) for name, value in weights.items())
