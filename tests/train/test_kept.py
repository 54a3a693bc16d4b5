"""What compression keeps, in checkpoints: bit for bit in the same layout, its sum in any other."""

from types import SimpleNamespace
from unittest.mock import patch

import kept_functions
import pytest
import torch
from live import LiveRun, make_plan
from torch.distributed.checkpoint import FileSystemReader

from mmlab.messages import new_command, send
from mmlab.parallel.buckets import Trained
from mmlab.parallel.compression.feedback import Kept
from mmlab.parallel.scatter import Rows as UnitRows
from mmlab.parallel.scatter import Unit
from mmlab.plan import Plan
from mmlab.train.kept import saved

SIDES = ("vision", "language")
TWO = ("parallel.vision=first_stage", "parallel.vision_dp=0", "parallel.pp=1", "parallel.dp=2")


def compressed(vision, language, **more):
    """Overrides for the compressors of both sides, with other fields of both."""
    fields = {f"communication.{side}.{key}": value for side in SIDES for key, value in more.items()}
    return {"communication.vision.compressor": vision, "communication.language.compressor": language, **fields}


def follow(pool, plan, *script):
    """Losses (equal on all ranks), and what each rank holds at each "held"."""
    plan.check().raise_if_any()
    pool.grow(plan.world_size)
    results = pool.run(kept_functions.follow, plan.dumps(), list(script), ranks=plan.world_size, timeout=90)
    assert all(losses == results[0][0] for losses, _, _ in results)
    return results[0][0], list(zip(*(held for _, held, _ in results), strict=True))


def same(first, second):
    assert len(first) == len(second) > 0
    for (name, offset, _, residual, _, factor), (other, there, _, left, _, right) in zip(first, second, strict=True):
        assert (name, offset) == (other, there)
        for a, b in ((residual, left), (factor, right)):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(a, b), name


def restored(pool, plan, tmp_path, *changes):
    """Six steps with changes after the third; steps 4 to 6 again from a checkpoint after the changes, in the same run
    and in a new one. Returns what was held when it was made."""
    folder = tmp_path / "here"
    changed = [("set", values) for values in changes]
    losses, held = follow(
        pool, plan, ("train", 3), *changed, ("save", folder), ("held",), ("train", 3), ("load", folder), ("held",),
        ("train", 3),
    )  # fmt: skip
    assert losses[6:] == losses[3:6]
    after = plan
    for values in changes:
        after = after.with_(values)
    anew, there = follow(pool, after, ("load", folder), ("held",), ("train", 3))
    assert anew == losses[3:6]
    for rank in range(plan.world_size):
        if held[0][rank]:
            same(held[0][rank], held[1][rank])
            same(held[0][rank], there[0][rank])
    return held[0]


@pytest.mark.parametrize(
    ("vision", "language"), [pytest.param("int8", "topk", marks=pytest.mark.slow), ("onebit", "powersgd")]
)
def test_restore_goes_on_bit_for_bit(pool, shards, tmp_path, vision, language):
    held = restored(pool, make_plan(shards, *TWO, compressed(vision, language)), tmp_path)
    assert all(any(residual.any() for *_, residual, _, _ in rank) for rank in held)
    assert any(factor is not None for *_, factor in held[0]) == (language == "powersgd")


CHANGES = {
    "a change of compressor": {"communication.language.compressor": "int8", "communication.vision.compressor": "topk"},
    "kept for later": compressed("none", "bf16", residual="keep"),
    "about to be added": compressed("none", "none", residual="flush"),
    "forgotten": compressed("none", "int8", residual="drop"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_restore_goes_on_bit_for_bit_from_a_live_change(pool, shards, tmp_path, name):
    plan = make_plan(shards, *TWO, compressed("powersgd", "onebit"))
    held = restored(pool, plan, tmp_path, CHANGES[name])
    assert all(bool(rank) == (name != "forgotten") for rank in held)


LAYOUTS = {
    "tensor": ("parallel.dp=2", "parallel.tp=2"),
    "sequence parallel": ("parallel.dp=2", "parallel.tp=2", "parallel.sp=true"),
    "tied over a pipeline": ("parallel.dp=2", "parallel.pp=2", "model.language.tied_embeddings=true"),
    "context": ("parallel.cp=2", "parallel.vision_dp=2"),
    "encoder on all ranks": ("parallel.vision=all_ranks", "parallel.vision_dp=0", "parallel.pp=2", "parallel.dp=2"),
    "zero1": ("parallel.dp=2", "parallel.sharding=zero1"),
    "fp16": ("parallel.dp=2", "precision.language=fp16"),
    "zero2": ("parallel.dp=3", "parallel.sharding=zero2"),
    "zero2 and tensor": ("parallel.dp=2", "parallel.tp=2", "parallel.sharding=zero2"),
}
PAIRS = [
    (layout, name) for layout in LAYOUTS for name in ("topk", "powersgd") if (layout[:5], name) != ("zero2", "powersgd")
]
PAIRS.append(("zero2", "onebit"))  # of three ranks' rows some are padding, which onebit codes as +


@pytest.mark.slow
@pytest.mark.parametrize(("layout", "language"), PAIRS)
def test_restore_goes_on_bit_for_bit_in_layouts(pool, shards, tmp_path, layout, language):
    changes = {"parallel.pp": 1, "data.global_batch": 12, **compressed("onebit", language)}
    restored(pool, make_plan(shards, changes, *LAYOUTS[layout]), tmp_path)


def passed_on(pool, data, tmp_path, first, second):
    """The sums of what is left out, in one layout and after its checkpoint was loaded in another."""
    changes = {"parallel.pp": 1, "data.global_batch": 12, **compressed("topk", "topk", bucket_mb=0.1)}
    plan = make_plan(data, changes, *first)
    _, (before,) = follow(pool, plan, ("train", 2), ("save", tmp_path / "here"), ("held",))
    plan = make_plan(data, changes, compressed("topk", "topk", bucket_mb=1.0), *second)
    _, (after,) = follow(pool, plan, ("load", tmp_path / "here"), ("held",))
    return kept_functions.sums(before), kept_functions.sums(after), after


def equal_sums(before, after):
    """To rounding: float32, added up in another order."""
    assert before.keys() == after.keys()
    assert [n for n, total in before.items() if not torch.allclose(after[n], total, rtol=1e-5, atol=1e-8)] == []


def test_another_number_of_copies_shares_out_the_sum(pool, shards, tmp_path):
    more = ("parallel.vision=first_stage", "parallel.vision_dp=0", "parallel.dp=3")
    before, after, ranks = passed_on(pool, shards, tmp_path, TWO, more)
    assert before.keys() == after.keys()
    assert [
        name for name, total in before.items() if not torch.allclose(after[name], total, rtol=1e-5, atol=1e-8)
    ] == []
    same(ranks[0], ranks[1])


@pytest.mark.slow
@pytest.mark.parametrize(("first", "second"), [
    ("tensor", "tied over a pipeline"), ("tied over a pipeline", "context"), ("zero1", "sequence parallel"),
    ("encoder on all ranks", "tensor"), ("context", "encoder on all ranks"), ("sequence parallel", "zero1"),
    ("zero1", "zero2"), ("zero2", "tensor"),
])  # fmt: skip
def test_any_layout_goes_on_with_the_sum(pool, shards, tmp_path, first, second):
    tied = "model.language.tied_embeddings=true"
    before, after, _ = passed_on(pool, shards, tmp_path, (tied, *LAYOUTS[first]), (tied, *LAYOUTS[second]))
    assert before.keys() == after.keys()
    assert [
        name for name, total in before.items() if not torch.allclose(after[name], total, rtol=1e-5, atol=1e-8)
    ] == []


def test_what_nobody_keeps_is_not_in_the_file_and_is_forgotten(pool, shards, tmp_path):
    dense = make_plan(shards, *TWO)
    follow(pool, dense, ("train", 1), ("save", tmp_path / "dense"))
    stored = FileSystemReader(tmp_path / "dense").read_metadata().state_dict_metadata
    assert not [key for key in stored if key.startswith("communication")]
    plan = make_plan(shards, *TWO, compressed("topk", "powersgd"))
    losses, (before, after) = follow(
        pool, plan, ("train", 2), ("held",), ("load", tmp_path / "dense"), ("held",), ("train", 2),
        ("load", tmp_path / "dense"), ("train", 2),
    )  # fmt: skip
    assert all(before)
    assert not any(after)
    assert losses[2:4] == losses[4:6] != losses[0:2]


def test_what_a_sharded_unit_keeps_is_copied_once():
    members = []
    for name in ("language.a", "language.b", "language.c"):
        rows = torch.zeros(1, 2)
        members.append((Trained(name, torch.nn.Parameter(rows), rows, "language", True), torch.Size((2, 2))))
    unit = Unit(UnitRows(2, members), Kept(torch.arange(12.0)), False)
    built = SimpleNamespace(reducer=SimpleNamespace(keepers=[unit]))
    with patch.object(unit, "parts", wraps=unit.parts) as parts:
        found = saved(Plan(), SimpleNamespace(place=None, reductions={}), built)
    assert parts.call_count == 1
    assert found["communication.language.b.residual"].tolist() == [[[2.0, 3.0], [8.0, 9.0]]]


def test_one_rank_adds_what_several_left_out(pool, shards, tmp_path):
    """And holds no factors, which it would never use."""
    plan = make_plan(shards, *TWO, compressed("topk", "powersgd"))
    follow(pool, plan, ("train", 2), ("save", tmp_path / "here"))
    alone = make_plan(shards, *TWO, compressed("topk", "powersgd"), "parallel.dp=1")
    _, (before, after) = follow(pool, alone, ("load", tmp_path / "here"), ("held",), ("train", 1), ("held",))
    assert before[0]
    assert not after[0]


@pytest.mark.slow
def test_a_live_run_restored_after_a_change_repeats_itself(pool, shards, tmp_path):
    saved = {"checkpoint.every_steps": 4, "train.steps": 9}
    plan = make_plan(shards, *TWO, compressed("topk", "int8"), saved)
    folder = tmp_path / "run"
    (folder / "control").mkdir(parents=True)
    send(folder / "control", new_command("step", {"n": 4}))
    run = LiveRun(pool, plan, folder)
    run.wait_for(lambda: run.events("state") and run.events("state")[-1]["state"] == "paused")
    assert run.do("set", values=compressed("none", "topk", residual="keep")).ok
    assert run.do("checkpoint", name="kept").ok
    run.do("resume")
    run.join()
    before = run.losses()
    again = LiveRun(pool, plan, folder, generation=2, restore="kept")
    again.join()
    lineage = again.events("lineage")[-1]["id"]
    steps = {e["step"]: e for e in again.events("step") if e["lineage"] == lineage}
    assert {n: e["loss"] for n, e in steps.items()} == {n: loss for n, loss in before.items() if n > 4}
    assert {m: c["compressor"] for m, c in steps[9]["compression"].items()} == {
        "vision": "none", "projector": "none", "language": "topk",
    }  # fmt: skip
    assert all(c["residual"] > 0 for c in steps[9]["compression"].values())


@pytest.mark.slow
def test_a_compressor_that_the_new_layout_cannot_have_is_not_restored(pool, shards, tmp_path):
    plan = make_plan(shards, *TWO, compressed("int8", "powersgd"), {"checkpoint.every_steps": 3, "train.steps": 4})
    run = LiveRun(pool, plan, tmp_path / "run")
    run.join()
    other = plan.with_(compressed("none", "none"), {"parallel.sharding": "zero2", "train.steps": 5})
    other.save(run.paths.plan)
    again = LiveRun(pool, other, tmp_path / "run", generation=2, restore="latest")
    again.join()
    (warning,) = again.events("warning")
    assert "powersgd has factors of whole matrices" in warning["message"]
    steps = {e["step"]: e for e in again.events("step") if e["lineage"] == again.events("lineage")[-1]["id"]}
    assert steps.keys() == {4, 5}
    assert {m: (c["compressor"], c["residual"] > 0) for m, c in steps[5]["compression"].items()} == {
        "vision": ("int8", True), "projector": ("int8", True),
    }  # fmt: skip
