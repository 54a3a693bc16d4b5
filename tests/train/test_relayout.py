"""Another layout while a run goes on, on warm ranks: the state moves, the losses stay."""

import json

import pytest
from live import LiveRun, make_plan

from mmlab.messages import RunPaths, new_command, send
from mmlab.messages.moves import memory_folders, read_move
from mmlab.messages.runs import take_over_move
from mmlab.plan import Plan
from mmlab.tracking import checkpoints
from mmlab.tracking.record import RunRecord

STEPS = 7


def begin(pool, plan, folder):
    """A run that waits before its first step."""
    paths = RunPaths(folder)
    paths.create()
    send(paths.control, new_command("pause"))
    info = {"id": "x", "generation": 1, "world_size": plan.world_size, "steps": plan.train.steps}
    paths.run.write_text(json.dumps(info))
    return LiveRun(pool, plan, folder)


def go_on(pool, run):
    """What the keeper does: the next generation, with the state that the one before has left."""
    assert set(run.join()) == {"moved"}
    move = read_move(run.paths)
    take_over_move(run.paths, move, run.events()[-1]["lineage"])
    following = LiveRun(pool, Plan.load(run.paths.plan), run.paths.root, generation=move.generation, restore=move.name)
    following.wait_for(lambda: [e for e in following.events("relayout") if e["generation"] == move.generation])
    return following


@pytest.fixture(scope="module")
def plain(pool, shards, tmp_path_factory):
    """Losses of the run that nobody disturbs."""
    run = LiveRun(pool, make_plan(shards, f"train.steps={STEPS}"), tmp_path_factory.mktemp("plain") / "run")
    run.join()
    return run.losses()


def test_the_same_layout_goes_on_bit_for_bit_and_a_pause_stays(pool, shards, plain, tmp_path):
    run = begin(pool, make_plan(shards, f"train.steps={STEPS}"), tmp_path / "run")
    run.do("step", n=3)
    run.wait_step(3)
    run.do("set", values={"checkpoint.keep_last": 9})
    ack = run.do("relayout", changes={"cluster.threads": 1})
    assert (ack.ok, ack.step) == (True, 3), ack.message
    run = go_on(pool, run)
    run.wait_for(lambda: run.events("state")[-1]["state"] == "paused")
    record = RunRecord(run.paths.root)
    assert record.plan.cluster.threads == 1
    assert record.plan.checkpoint.keep_last == 9
    assert run.do("resume").ok
    assert set(run.join()) == {"finished"}
    assert run.losses() == plain
    (event,) = run.events("relayout")
    assert (event["through"], event["before"], event["after"], event["step"]) == ("memory", 3, 3, 3)
    assert event["changes"] == {"cluster.threads": [0, 1]}
    assert record.ledger().ok
    assert [row["step"] for row in record.metrics()] == list(range(1, STEPS + 1))
    assert not run.paths.move.exists()
    assert not any(folder.exists() for folder in memory_folders(run.paths))
    assert (run.paths.plans / "generation-1.toml").is_file()


@pytest.mark.slow
def test_many_layouts_one_after_the_other_and_the_losses_stay(pool, shards, plain, tmp_path):
    """More ranks, fewer, other placements, shards and schedules; a rate that was set meanwhile stays."""
    layouts = [
        {"parallel.tp": 2, "parallel.pp": 1, "parallel.sp": True},  # as many ranks
        {"parallel.dp": 2, "parallel.tp": 2, "parallel.pp": 1, "parallel.vision_dp": 2, "parallel.sharding": "zero2",
         "sharding.language": "layer"},  # more
        {"parallel.vision": "first_stage", "parallel.vision_dp": 0, "parallel.dp": 1, "parallel.tp": 1,
         "parallel.sp": False, "parallel.sharding": "none"},  # one
        {"parallel.vision": "all_ranks", "parallel.cp": 2, "parallel.pp": 2, "parallel.schedule": "zb_h1",
         "parallel.microbatches": 4},
        {"parallel.vision": "own_ranks", "parallel.vision_dp": 1, "parallel.cp": 1, "parallel.pp": 1,
         "parallel.schedule": "1f1b", "parallel.dp": 2, "parallel.sharding": "zero3"},
    ]  # fmt: skip
    run = begin(pool, make_plan(shards, f"train.steps={STEPS}"), tmp_path / "run")
    for number, changes in enumerate(layouts):
        run.do("step", n=1)
        run.wait_step(number + 1)
        ack = run.do("relayout", changes=changes)
        assert ack.ok, ack.message
        run = go_on(pool, run)
    run.do("resume")
    assert set(run.join()) == {"finished"}
    record = RunRecord(run.paths.root)
    worlds = [(event["before"], event["after"]) for event in run.events("relayout")]
    assert worlds == [(3, 3), (3, 6), (6, 1), (1, 4), (4, 3)]
    losses = {row["step"]: row["loss"] for row in record.metrics()}
    assert losses.keys() == plain.keys()
    for step, loss in losses.items():
        assert loss == pytest.approx(plain[step], rel=1e-5), step
    assert record.ledger().ok, record.ledger().problems
    assert str(record.traffic()).count("\n") > 1
    assert len(list(run.paths.plans.glob("*.toml"))) == 5


def test_what_would_be_another_run_is_refused_and_the_run_goes_on(pool, shards, tmp_path):
    run = begin(pool, make_plan(shards, f"train.steps={STEPS}"), tmp_path / "run")
    for changes, said in (
        ({"model.language.hidden": 256}, "model.language.hidden stays 128, it cannot become 256: the weights would"),
        ({"data.lanes": 4, "parallel.tp": 2}, "data.lanes stays 8"),
        ({"data.global_batch": 32}, "the samples or their order would be others"),
        ({"train.seed": 1}, "it would be another training"),
        ({"name": "other"}, "part of the folder's name"),
        ({"parallel.tp": 3}, "parallel.tp"),
        ({"parallel.tpp": 3}, "nearest known one is parallel.tp"),
        ({"parallel.tp": "many"}, "must be a whole number"),
        ({"parallel.tp": 1}, "nothing to change"),
        ({}, "takes changes by dotted key"),
        (7, "takes changes by dotted key"),
    ):
        ack = run.do("relayout", changes=changes)
        assert not ack.ok, changes
        assert said in ack.message
    assert not run.do("relayout").ok
    assert not run.paths.move.exists()
    assert run.do("step", n=1).ok
    run.wait_step(1)
    assert run.do("stop").ok
    assert set(run.join()) == {"stopped"}


@pytest.mark.slow
def test_a_rank_that_fails_while_groups_are_made_leaves_none_in_the_others(pool, shards, tmp_path):
    plan = make_plan(shards, "train.steps=2")
    paths = RunPaths(tmp_path / "run")
    paths.create()
    plan.save(paths.plan)
    pool.grow(plan.world_size)
    states = pool.run("train_functions:broken_mesh", str(paths.root), ranks=plan.world_size, timeout=90)
    assert states == [("failed", "finished")] * plan.world_size


@pytest.mark.slow
def test_back_to_a_checkpoint_and_into_another_layout_in_one_command(pool, shards, plain, tmp_path):
    run = begin(pool, make_plan(shards, f"train.steps={STEPS}"), tmp_path / "run")
    run.do("step", n=2)
    run.wait_step(2)
    assert run.do("checkpoint", name="two").ok
    run.do("step", n=2)
    run.wait_step(4)
    ack = run.do("restore", name="two", changes={"data.lanes": 4})
    assert not ack.ok
    assert "data.lanes stays 8" in ack.message
    assert len(run.events("lineage")) == 1  # nothing was loaded
    ack = run.do("restore", name="two", step=2, changes={"parallel.tp": 2, "parallel.pp": 1})
    assert ack.message.startswith("restored two (step 2); another layout: parallel.tp 1 -> 2")
    run = go_on(pool, run)
    run.do("resume")
    assert set(run.join()) == {"finished"}
    record = RunRecord(run.paths.root)
    assert {row["step"]: row["loss"] for row in record.metrics()} == pytest.approx(plain, rel=1e-5)
    assert record.ledger().ok, record.ledger().problems
    assert [lineage["why"] for lineage in checkpoints.lineages(record)] == [
        "the start",
        "restored two",
        "another layout",
    ]
