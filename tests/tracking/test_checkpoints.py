"""Checkpoints as a person handles them: what each holds, the tree, names, deletion, beside a run that goes on."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from ui.synthetic import SyntheticRun, branch_out, playing

from mmlab.errors import CheckpointError, MmlabError, PlanError
from mmlab.lab import Run
from mmlab.messages import write_json
from mmlab.messages.checkpoints import FROZEN, MANIFEST, flaw, read_manifest, seal
from mmlab.messages.locations import Location
from mmlab.messages.runs import create_run
from mmlab.plan import Plan
from mmlab.plan.branching import branched, live_as
from mmlab.tracking import checkpoints
from mmlab.tracking.tree import CheckpointTree


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A run with three lineages: a (steps 10, 20, 30), b from 20 (30), c from b's 30, which is live."""
    monkeypatch.setenv("MMLAB_RUNS", str(tmp_path))
    with playing(tmp_path) as run:
        branch_out(run, last=2)
        yield run


def test_each_says_what_it_holds(made):
    run = Run(made.dir)
    rows = {row["name"]: row for row in run.checkpoints()}
    assert list(rows) == ["step-000010-a", "step-000020-a", "step-000030-a", "best"]
    best = rows["best"]
    assert (best["layout"], best["samples"]) == ("6 ranks: vision_dp 2, tp 2, pp 2", 30 * made.plan.data.global_batch)
    assert (best["periodic"], best["reason"], best["lineage"], best["frozen"]) == (False, "command", "b", [])
    info = run.checkpoint_info("best")
    assert info["plan"] == made.plan
    assert info["position"]["taken"] == [best["samples"]]
    assert sum(info["files"].values()) == best["bytes"]
    assert (info["current"], info["problem"]) == (True, "")
    assert not run.checkpoint_info("step-000030-a")["current"]
    data = next(Path(best["path"]).glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    assert "damaged" in run.checkpoint_info("best")["problem"]
    with pytest.raises(CheckpointError, match=r"no checkpoint nothing; it has: step-000010-a \(step 10\)"):
        run.checkpoint_info("nothing")


def test_the_tree_has_branches_and_branched_runs(made, tmp_path):
    parent = {"run": made.dir.name, "dir": str(made.dir), "name": "best", "step": 30, "lineage": "b"}
    branch = create_run(tmp_path, "other", made.plan.dumps(), 6, 200, parent=parent)
    run = Run(made.dir)
    tree = CheckpointTree.of(run)
    found = [(node["kind"], node["depth"], node.get("name") or node.get("id") or node["run"]) for node in tree.nodes]
    assert found == [
        ("lineage", 0, "a"), ("checkpoint", 1, "step-000010-a"), ("checkpoint", 1, "step-000020-a"),
        ("checkpoint", 1, "step-000030-a"), ("lineage", 1, "b"), ("checkpoint", 2, "best"), ("run", 3, "best"),
        ("lineage", 2, "c"),
    ]  # fmt: skip
    assert [node["current"] for node in tree.nodes if node["kind"] == "checkpoint"] == [True, True, False, True]
    assert run.branches() == [{**parent, "run": branch.root.name, "dir": str(branch.root)}]
    text = str(tree)
    assert "lineage b: restored step-000020-a at step 20, to step 30" in text
    assert "lineage c: restored best at step 30, to step 32; the run stands here" in text
    assert "step-000030-a (taken back)" in text
    assert f"-> run {branch.root.name}" in text
    json.dumps(tree.to_json())


def test_a_run_without_checkpoints_has_an_empty_tree(started_run):
    assert str(CheckpointTree.of(Run(started_run.dir))) == "no checkpoint yet"


@pytest.fixture
def started_run(tmp_path):
    run = SyntheticRun(tmp_path)
    run.start()
    yield run
    run.close()


def test_a_branch_inherits_what_it_began_with(made, tmp_path):
    """A run whose first lineage has a parent of another run, and that run's checkpoint among its own."""
    paths = create_run(tmp_path, "other", made.plan.dumps(), 6, 200)
    source = Run(made.dir)._record.found_checkpoint(name="best")[1]
    origin = {"run": made.dir.name, "name": "best"}
    checkpoints.copy(source, Location(paths.checkpoints), {"origin": origin, "periodic": False})
    other = SyntheticRun.__new__(SyntheticRun)
    other.__dict__ |= made.__dict__ | {"paths": paths, "beacons": []}
    other.events = type(made.events)(paths.events, "x")
    other.events.emit("lineage", step=30, id="x", parent="b", parent_step=30)
    other.events.emit("restore", step=30, name="best", from_step=30, values={})
    run = Run(paths.root)
    info = run.checkpoint_info("best")
    assert (info["current"], info["origin"], info["problem"]) == (True, f"{made.dir.name}, best", "")
    tree = CheckpointTree.of(run)
    assert [(node["kind"], node["depth"]) for node in tree.nodes] == [("checkpoint", 0), ("lineage", 0)]
    assert tree.nodes[0]["current"]
    assert "lineage x: restored best at step 30" in str(tree)


def test_a_name_keeps_a_checkpoint(made):
    run = Run(made.dir)
    row = run.rename_checkpoint("step-000020-a", "Größe 7")
    assert (row["name"], row["periodic"], row["step"]) == ("Größe 7", False, 20)
    manifest = read_manifest(Location(row["path"]))
    assert manifest["seal"] == seal(manifest)
    assert run.checkpoint_info("Größe 7")["problem"] == ""
    with pytest.raises(CheckpointError, match="no checkpoint step-000020-a"):
        run.checkpoint_info("step-000020-a")
    assert run.rename_checkpoint("Größe 7", "seven")["step"] == 20


@pytest.mark.parametrize("new", ["", "a/b", "..", ".frozen", "a\\b", "x" * 201, " padded", "line\nbreak", "best"])
def test_names_that_are_none_are_refused(made, new):
    run = Run(made.dir)
    with pytest.raises(CheckpointError):
        run.rename_checkpoint("step-000010-a", new)
    assert run.checkpoints()[0]["name"] == "step-000010-a"


def test_a_damaged_one_is_not_named_but_deleted(made):
    run = Run(made.dir)
    path = Path(run.checkpoint_info("step-000010-a")["path"])
    next(path.glob("*.distcp")).unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        run.rename_checkpoint("step-000010-a", "ten")
    run.delete_checkpoint("step-000010-a")
    assert not path.exists()


def test_a_live_run_keeps_what_it_would_recover_from(made):
    run = Run(made.dir)
    with pytest.raises(CheckpointError, match=r"best is the newest checkpoint .* with force"):
        run.delete_checkpoint("best")
    assert run.delete_checkpoint("step-000030-a")["step"] == 30
    assert run.delete_checkpoint("best", force=True)["name"] == "best"
    with pytest.raises(CheckpointError, match="newest"):
        run.delete_checkpoint("step-000020-a")
    with pytest.raises(CheckpointError, match="no checkpoint best"):
        run.delete_checkpoint("best")


def test_the_newest_good_one_counts_not_a_damaged_newer_one(made):
    run = Run(made.dir)
    next(Path(run.checkpoint_info("best")["path"]).glob("*.distcp")).unlink()
    with pytest.raises(CheckpointError, match="step-000020-a is the newest"):
        run.delete_checkpoint("step-000020-a")
    run.delete_checkpoint("best")


def test_what_is_frozen_goes_with_the_last_that_refers_to_it(made):
    place = made.paths.checkpoints / FROZEN / "vision-1"
    place.mkdir(parents=True)
    part = {"name": "vision-1", "time": 1.0, "files": {}, "content": "c", "bytes": 9}
    (place / MANIFEST).write_text(json.dumps(part | {"seal": seal(part)}))
    frozen = {"vision": {"folder": "vision-1", "content": "c", "bytes": 9}}
    for name in ("one", "two"):
        made.checkpoint(name, frozen=frozen)
        made.train(1)
    made.checkpoint("other")
    run = Run(made.dir)
    assert run.checkpoint_info("one")["frozen"] == ["vision"]
    assert run.checkpoint_info("one")["shared_bytes"] == 9
    run.delete_checkpoint("one")
    made.finish()
    unread = made.paths.checkpoints / "other" / MANIFEST
    whole = unread.read_bytes()
    unread.write_bytes(b"")  # as from a disk that does not answer: nobody knows what it refers to
    run.delete_checkpoint("two")
    assert place.exists()
    unread.write_bytes(whole)
    run.delete_checkpoint("step-000010-a")
    assert not place.exists()


def test_a_live_run_removes_frozen_parts_itself(made):
    """A save under way may count on one that nothing refers to yet."""
    place = made.paths.checkpoints / FROZEN / "vision-1"
    place.mkdir(parents=True)
    Run(made.dir).delete_checkpoint("step-000010-a")
    assert place.exists()


def test_the_one_that_a_run_is_moved_with_stays(made):
    move = {
        "generation": 1, "command": "", "name": "step-000010-a", "folder": "", "host": "", "memory": False, "step": 10,
        "plan": "", "before": 6, "after": 6, "began": 0.0, "bytes": 0, "changes": {}, "notice": "a host goes away",
    }  # fmt: skip
    write_json(made.paths.move, move)
    with pytest.raises(CheckpointError, match="about to go on from"):
        Run(made.dir).delete_checkpoint("step-000010-a", force=True)
    Run(made.dir).rename_checkpoint("step-000010-a", "ten")  # the move knows it by its folder
    with pytest.raises(CheckpointError, match="about to go on from"):
        Run(made.dir).delete_checkpoint("ten", force=True)


@pytest.mark.parametrize("address", ["file://{folder}", "memory://browsed{folder}"])
def test_all_of_it_works_where_checkpoints_lie_elsewhere(made, tmp_path, address):
    location = address.format(folder=tmp_path / "elsewhere")
    for source in sorted(made.paths.checkpoints.iterdir()):
        target = Location(location) / made.dir.name / source.name
        target.make()
        for file in source.iterdir():
            target.write(file.name, file.read_bytes())
    made.plan.with_({"checkpoint.location": location}).save(made.paths.plan)
    run = Run(made.dir)
    assert [row["name"] for row in run.checkpoints()][-1] == "best"
    assert run.rename_checkpoint("best", "better")["path"].endswith("/best")
    assert run.checkpoint_info("better")["problem"] == ""
    for copied in (Location(tmp_path / "copy"), Location(f"memory://copied{tmp_path}")):
        checkpoints.copy(run._record.found_checkpoint(name="better")[1], copied, {"reason": "copied"})
        manifest = read_manifest(copied / "better")
        assert (manifest["reason"], flaw(copied / "better", manifest)) == ("copied", "")
    run.delete_checkpoint("step-000030-a")
    assert [row["name"] for row in run.checkpoints()] == ["step-000010-a", "step-000020-a", "better"]


def test_a_location_that_cannot_be_reached_is_one_sentence(made):
    made.plan.with_({"checkpoint.location": "nowhere://bucket"}).save(made.paths.plan)
    with pytest.raises(CheckpointError, match="cannot be read"):
        Run(made.dir).checkpoints()


def test_a_copy_on_the_same_disk_takes_no_room_and_outlives_its_source(made, tmp_path):
    source = Run(made.dir)._record.found_checkpoint(name="best")[1]
    copied = Location(tmp_path / "copy")
    checkpoints.copy(source, copied, {})
    (file, *_) = (tmp_path / "copy" / "best").glob("*.distcp")
    assert file.stat().st_nlink == 2
    source[0].remove()
    assert flaw(copied / "best", read_manifest(copied / "best")) == ""


def test_a_branch_keeps_model_and_data(made, tmp_path):
    run = Run(made.dir)
    plan = run.branched_plan("parallel.tp=1", "train.language.lr=1e-5", name="best")
    assert (plan.parallel.tp, plan.train.language.lr, plan.world_size) == (1, 1e-5, 4)
    assert live_as(made.plan, plan).train.language.lr == 1e-5
    assert live_as(made.plan, plan).parallel.tp == 2
    for changes, said in (
        (("model.language.hidden=96", "data.lanes=4"), r"(?s)model\.language\.hidden stays .*data\.lanes stays"),
        (("data.seed=5",), r"data\.seed stays 0, not 5"),
        (("train.steps=30",), "nothing is left to train"),
        (("parallel.tp=3",), "parallel.tp"),
        (("no.key=3",), "unknown key no.key"),
        (("nonsense",), "no preset of that name"),
    ):
        with pytest.raises(PlanError, match=said):
            run.branched_plan(*changes, name="best")
    assert run.branched_plan("laptop", "train.steps=50", name="best").world_size == 3
    path = made.plan.with_("train.steps=500").save(tmp_path / "long.toml")
    assert run.branched_plan(path, "parallel.pp=1", step=20).train.steps == 500
    next(Path(run.checkpoint_info("best")["path"]).glob("*.distcp")).unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        run.branched_plan(name="best")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_branch_that_is_cut_short_leaves_no_run(made, tmp_path, monkeypatch, error):
    def cut_short(*_):
        raise error("no room")

    monkeypatch.setattr(checkpoints, "copy", cut_short)
    lab = SimpleNamespace(_check_fits=lambda plan: None)
    with pytest.raises(KeyboardInterrupt if error is KeyboardInterrupt else CheckpointError, match="no room"):
        Run(made.dir).branch("parallel.tp=1", name="best", lab=lab)
    assert [path.parent for path in tmp_path.glob("*/run.json")] == [made.dir]


def test_adapters_go_along(made):
    saved = made.plan.with_("train.language.lora_rank=4")
    assert branched(saved, 10, "parallel.tp=1").train.language.lora_rank == 4
    for changes in (["train.language.lora_rank=0"], ["train.language.lora_rank=8"], ["train.language.lora_alpha=3"]):
        with pytest.raises(PlanError, match=r"train\.language\.lora"):
            branched(saved, 10, *changes)


def test_a_live_run_goes_back_in_another_layout_by_one_command(made):
    run = Run(made.dir)
    sent = run.restore(name="best", plan="parallel.tp=1")
    (command,) = [json.loads(path.read_text()) for path in made.paths.control.glob("*.json")]
    assert (command["verb"], command["id"]) == ("restore", sent.id)
    assert command["args"] == {"step": 30, "name": "best", "changes": {"parallel.tp": 1}}
    assert run.restored_plan("parallel.tp=1", "parallel.pp=1").world_size == 3
    with pytest.raises(PlanError, match="stays"):
        run.restore(name="best", plan=["data.lanes=3"])
    with pytest.raises(PlanError, match="nothing to change"):
        run.restored_plan("parallel.tp=2")


def test_comparing_needs_two_that_exist(made):
    run = Run(made.dir)
    with pytest.raises(CheckpointError, match="no checkpoint nothing"):
        run.compare("best", "nothing")
    with pytest.raises(CheckpointError, match="no checkpoint at step 7"):
        run.compare(7, "best")
    with pytest.raises(CheckpointError, match="not True"):
        run.compare("best", True)
    with pytest.raises(MmlabError, match=r"holds no run\.json"):
        run.compare("best", "best", of=made.dir / "logs")


def test_plans_are_saved_whole(made):
    assert Plan.loads(read_manifest(Location(made.paths.checkpoints / "best"))["plan"]) == made.plan
