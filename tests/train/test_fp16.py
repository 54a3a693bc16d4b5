"""fp16: the loss scale, agreed by all ranks, kept in checkpoints; what of the encoder stays in fp32."""

import fp16_functions
import pytest
import torch
import torch.distributed.checkpoint as dcp

from mmlab.cluster.verify import in_precision
from mmlab.messages import RunPaths, read_events
from mmlab.models.initial import parameter_maker
from mmlab.models.sharding import parameter_specs
from mmlab.models.vit import Block
from mmlab.parallel.tensor import TensorGroup
from mmlab.plan import Plan
from mmlab.train.checkpoint import quiet
from mmlab.train.precision import LARGEST_SCALE, LossScale

TINY = {
    "model.vision.image_size": 32, "model.vision.hidden": 32, "model.vision.layers": 1,
    "model.language.hidden": 32, "model.language.layers": 2, "model.language.vocab_size": 512,
    "data.global_batch": 4, "data.seq_len": 32, "data.held_out": "",
    "parallel.vision_dp": 2, "parallel.microbatches": 1, "precision.vision": "fp16",
}  # fmt: skip


def make_plan(shards, *changes):
    return Plan.load("laptop").with_(TINY | {"data.path": str(shards)}, *changes)


def play(pool, plan, folder, at_steps, restore=None):
    """Run a plan whose encoder overflows on rank 1 alone; states and events."""
    pool.grow(plan.world_size)
    paths = RunPaths(folder)
    paths.create()
    plan.save(paths.plan)
    args = (str(folder), restore, 1, at_steps)
    states = pool.run(fp16_functions.overflowing, *args, ranks=plan.world_size, timeout=90)
    return states, read_events(paths.events)[0]


def weights(folder):
    """All tensors of a checkpoint."""
    stored = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    values = {key: torch.empty(tuple(entry.size), dtype=entry.properties.dtype) for key, entry in stored.items()}
    with quiet():
        dcp.load(values, checkpoint_id=folder, no_dist=True)
    return values


def test_the_scale_halves_doubles_and_stays_a_power_of_two():
    plan = Plan().with_("precision.language=fp16", "precision.loss_scale_power=3", "precision.loss_scale_window=2")
    scale = LossScale(plan)
    seen = []
    for finite in (True, True, True, False, True, True, False):
        seen.append((scale.value, scale.judge(finite)))
    assert seen == [
        (8.0, False), (8.0, False), (16.0, False), (16.0, True), (8.0, False), (8.0, False), (16.0, True),
    ]  # fmt: skip
    again = LossScale(plan)
    again.load(scale.state())
    assert (again.value, again.good) == (scale.value, scale.good)
    again.load({})
    assert (again.value, again.good) == (8.0, 0)
    for _ in range(4):
        scale.judge(False)
    assert scale.value == 1.0
    assert not scale.judge(False)  # nothing smaller can help: the run ends
    for _ in range(100):
        scale.judge(True)
    assert scale.value == LARGEST_SCALE


@pytest.mark.parametrize("formats", ["fp32", "fp64"])
def test_without_fp16_nothing_is_scaled(formats):
    scale = LossScale(
        Plan().with_("precision.vision=fp16", *(f"precision.{m}={formats}" for m in ("vision", "language")))
    )
    assert scale.state() == {}
    assert not scale.judge(True)
    assert not scale.judge(False)
    scale.load({"value": 8.0, "good": 1})
    assert scale.value == 1.0


def test_an_overflow_on_one_rank_is_left_out_by_all(pool, shards, tmp_path):
    changes = ("precision.loss_scale_power=10", "precision.loss_scale_window=3", "train.steps=7",
               "checkpoint.every_steps=1", "checkpoint.keep_last=0")  # fmt: skip
    plan = make_plan(shards, *changes)
    states, events = play(pool, plan, tmp_path / "run", [3])
    assert set(states) == {"finished"}
    (overflow,) = (e for e in events if e["kind"] == "overflow")
    assert (overflow["step"], overflow["modules"], overflow["loss_scale"]) == (3, ["vision"], 512.0)
    steps = [e for e in events if e["kind"] == "step"]
    assert [e["loss_scale"] for e in steps] == [1024.0] * 3 + [512.0] * 3 + [1024.0]
    assert steps[2]["grad_norm"]["vision"] is None
    assert steps[2]["grad_norm"]["language"] > 0
    assert all(e["loss"] > 0 for e in steps)
    saved = {e["step"]: tmp_path / "run" / "checkpoints" / e["name"] for e in events if e["kind"] == "checkpoint"}
    before, at, after = (weights(saved[step]) for step in (2, 3, 4))
    assert all(torch.equal(before[key], at[key]) for key in before)  # optimizer state and step counts too
    assert any(not torch.equal(at[key], after[key]) for key in at if key.startswith("model.vision."))
    warned = [e["message"] for e in events if e["kind"] == "warning"]
    assert any("fp16 on a CPU" in message for message in warned)

    # The scale and its count of good steps come back: one more good step after step 5, then it doubles.
    (tmp_path / "again" / "checkpoints").mkdir(parents=True)
    saved[5].rename(tmp_path / "again" / "checkpoints" / saved[5].name)
    _, resumed = play(pool, plan, tmp_path / "again", [], restore="latest")
    resumed = [e for e in resumed if e["kind"] == "step"]
    assert [(e["step"], e["loss_scale"], e["loss"]) for e in resumed] == [
        (e["step"], e["loss_scale"], e["loss"]) for e in steps[5:]
    ]


def test_overflows_that_persist_end_the_run(pool, shards, tmp_path):
    states, events = play(pool, make_plan(shards, "precision.loss_scale_power=2"), tmp_path / "run", list(range(1, 9)))
    assert set(states) == {"failed"}
    assert [e["loss_scale"] for e in events if e["kind"] == "overflow"] == [2.0, 1.0]
    reason = events[-1]["reason"]
    assert "the gradient of vision is not a finite number at the smallest loss scale (1)" in reason
    assert "precision.<module>" in reason


def test_a_loss_scale_changes_nothing_in_float64(pool, shards, tmp_path):
    """Every gradient carries it once, through tensor and pipeline groups, the exchange and a tied table."""
    plan = in_precision(make_plan(shards, "parallel.pp=2", "parallel.tp=2", "parallel.vision_dp=1"), "fp64")
    pool.grow(plan.world_size)
    pool.run(fp16_functions.scaled_in_float64, plan.dumps(), str(tmp_path), ranks=plan.world_size, timeout=90)
    pool.run("mmlab.train.verify:run_reference", plan.dumps(), 3, str(tmp_path), ranks=1)
    found = pool.run("mmlab.train.verify:compare", str(tmp_path), str(tmp_path), ranks=1)[0]
    assert max(found["loss"], found["grad"], found["param"]) < 1e-9


def test_norms_and_attention_of_an_encoder_in_fp16_are_computed_in_fp32():
    plan = Plan().with_("model.vision.hidden=32")
    make = parameter_maker(parameter_specs(plan), 0, TensorGroup(), torch.float32, torch.device("cpu"))
    block = Block(plan.model.vision, make, "vision.vision_model.encoder.layers.0")
    hidden = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    seen = []

    def recorded(function):
        def call(x, *args):
            seen.append((function.__name__, x.dtype))
            return function(x, *args)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in ("layer_norm", "scaled_dot_product_attention", "linear"):
            patch.setattr(torch.nn.functional, name, recorded(getattr(torch.nn.functional, name)))
        out = block(hidden.half())
    assert out.dtype == torch.float16
    assert {name for name, dtype in seen if dtype == torch.float16} == {"linear"}
    assert {name for name, dtype in seen if dtype == torch.float32} == {"layer_norm", "scaled_dot_product_attention"}
    assert (out.float() - block(hidden)).norm() / hidden.norm() < 2e-3
