"""What the keeper does about a failure, with engines that are only described."""

import json
import logging
import time
from types import SimpleNamespace

import pytest
from test_launching import Described, start

from mmlab.cluster import watching
from mmlab.cluster.elastic import grow_back, shrink
from mmlab.cluster.engine_info import EngineInfo
from mmlab.cluster.keeper import Keeper
from mmlab.cluster.launching import Lacking, choose, go_on, take_over
from mmlab.cluster.recovery import tidy
from mmlab.cluster.watching import watch
from mmlab.errors import LabError
from mmlab.messages import (
    Beacon,
    EventLog,
    Failure,
    Inbox,
    new_command,
    read_ack,
    read_events,
    read_failures,
    read_json,
    send,
    write_failure,
)
from mmlab.messages.moves import Move, read_move, write_move
from mmlab.messages.runs import create_run
from mmlab.plan import Plan
from mmlab.tracking.doctor import diagnose
from mmlab.tracking.record import RunRecord


def make(folder, *changes):
    text = Plan.preset("laptop").with_("parallel.vision_dp=2", *changes).dumps()
    paths = create_run(folder, "x", text, world_size=4, steps=10)
    return take_over({"run_dir": str(paths.root), "generation": 1, "restore": None, "time": 0.0})


@pytest.fixture
def run(tmp_path):
    return make(tmp_path, "cluster.max_recoveries=2")


def say(run, *states, **fields):
    log = EventLog(run.paths.events)
    for state in states:
        log.emit("state", state=state, step=0, **fields)
    log.close()


def stepped(run, step):
    log = EventLog(run.paths.events)
    log.emit("step", step=step, loss=1.0)
    log.close()


def fail(run, rank, kind="exception", message="x"):
    write_failure(run.paths.failures, run.generation, Failure(rank, f"stage {rank}", "forward", 3, kind, message))


def events(run, kind):
    return [event for event in read_events(run.paths.events)[0] if event["kind"] == kind]


def test_survivors_keep_their_ranks_and_a_lost_one_gets_an_engine_of_its_host():
    team = [EngineInfo(id, id, 1.0, host, False) for id, host in enumerate("aabb")]
    up = [team[0], team[2], team[3], EngineInfo(7, 7, 1.0, "b", False), EngineInfo(8, 8, 1.0, "a", False)]
    assert [engine.id for engine in choose(up, 4, team)] == [0, 8, 2, 3]
    assert [engine.id for engine in choose(up[:4], 4, team)] == [0, 7, 2, 3]
    assert [engine.id for engine in choose(up, 5, [])] == [0, 8, 2, 3, 7]


def test_a_lost_rank_is_replaced_and_the_run_goes_on_from_its_newest_checkpoint(run):
    engines = Described(["a"] * 5)
    start(run, engines)
    say(run, "running")
    assert [job["recovers"] for _, job in engines.started] == [True] * 4
    (run.paths.checkpoints / "step-3").mkdir()
    (run.paths.checkpoints / "step-3" / "manifest.json").write_text('{"name": "step-3", "step": 3, "time": 1}')
    engines.gone.add(1)
    watch(run, engines)
    assert run.again.restore == "latest"
    assert RunRecord(run.paths.root).status()["state"] == "starting"
    following = go_on(run)
    start(following, engines)
    assert [id for id, _ in engines.started] == [0, 4, 2, 3]
    assert {(job["generation"], job["restore"]) for _, job in engines.started} == {(2, "latest")}
    status = RunRecord(run.paths.root).status()
    assert status["state"] == "starting"
    assert status["reason"].startswith("recovering (1 of 2): rank 1 (rank 1) failed in start of step 0: its process")
    stepped(following, 4)
    watch(following, engines)
    begun, done = events(run, "recovery")
    assert (begun["done"], begun["cause"], begun["rank"], begun["attempt"], begun["of"]) == (False, "lost", 1, 1, 2)
    assert (done["done"], done["generation"], done["replaced"], done["restore"]) == (True, 2, {"1": 4}, "latest")
    assert done["seconds"] >= 0


def test_a_generation_that_fails_soon_after_its_first_step_has_recovered(run, monkeypatch):
    engines = Described(["a"] * 4)
    start(run, engines)
    fail(run, 1)
    watch(run, engines)
    second = go_on(run)
    start(second, engines)

    def meanwhile(*about):
        stepped(second, 1)
        fail(second, 2)
        return read_failures(*about)

    monkeypatch.setattr(watching, "read_failures", meanwhile)
    watch(second, engines)
    assert [event["done"] for event in events(run, "recovery")] == [False, True, False]


def test_a_run_that_falls_back_to_the_layout_before_has_not_failed_for_a_moment(run):
    folder = run.paths.checkpoints / "relayout-step-5"
    move = Move(1, "", folder.name, str(folder), "host", False, 5, "", 4, 4, 0.0, 0, {})
    run.paths.plans.mkdir()
    (run.paths.plans / "generation-0.toml").write_bytes(run.paths.plan.read_bytes())
    write_move(run.paths, move)
    engines = Described(["a"] * 4)
    start(run, engines)
    fail(run, 1, "input", "torch sees 0 GPUs")
    watch(run, engines)
    assert run.again.reason.startswith("back in the layout before")
    assert RunRecord(run.paths.root).status()["state"] == "starting"
    go_on(run)
    status = RunRecord(run.paths.root).status()
    assert (status["state"], status["generation"]) == ("starting", 2)
    assert read_move(run.paths) is None


def test_a_rank_that_dies_before_the_new_layout_is_taken_up_leaves_the_command_answered(run):
    """Else the generation after would refuse it as one that changes nothing."""
    engines = Described(["a"] * 5)
    start(run, engines)
    command = new_command("relayout", {"changes": {"parallel.tp": 2}})
    send(run.paths.control, command)
    folder = run.paths.checkpoints / "relayout-step-5"
    folder.mkdir()
    (folder / "manifest.json").write_text('{"name": "relayout-step-5", "step": 5, "time": 1}')
    changes = {"parallel.tp": [1, 2]}
    write_move(run.paths, Move(1, command.id, folder.name, str(folder), "", False, 5, "", 2, 4, 0.0, 0, changes))
    engines.gone.add(1)
    watch(run, engines)
    go_on(run)
    assert read_ack(run.paths.control, command.id).ok
    (moved,) = events(run, "relayout")
    assert (moved["changes"], moved["after"], moved["steps"]) == (changes, 4, Plan.load(run.paths.plan).train.steps)
    assert [event["ok"] for event in events(run, "command")] == [True]
    assert read_move(run.paths) is None


def test_after_so_many_recoveries_the_run_fails_with_their_history(run):
    engines, now = Described(["a"] * 4), run
    for rank in (2, 1, 3):
        start(now, engines)
        say(now, "running")
        fail(now, rank)
        watch(now, engines)
        last, now = now, go_on(now) if now.again else now
    assert (last.generation, last.again, last.state) == (3, None, "failed")
    reason = RunRecord(run.paths.root).status()["reason"]
    assert reason.startswith("rank 3 (stage 3) failed in forward of step 3: x; recovered 2 times before")
    assert "cluster.max_recoveries = 2 within 3600 s): rank 2 (stage 2)" in reason
    assert engines.killed == []


def test_what_lies_before_the_window_does_not_count(run):
    engines, now = Described(["a"] * 4), run
    for rank in (0, 1, 2, 3):
        start(now, engines)
        fail(now, rank)
        now.history[:] = [past.__class__(-1e9, past.failure, past.attempt, past.pid) for past in now.history]
        watch(now, engines)
        now = go_on(now)
    assert now.generation == 5
    assert [event["attempt"] for event in events(run, "recovery")] == [1] * 4


def test_a_rank_that_fails_again_gets_another_process(run):
    engines, now = Described(["a"] * 5), run
    for _ in range(2):
        start(now, engines)
        fail(now, 2)
        watch(now, engines)
        now = go_on(now)
    start(now, engines)
    assert engines.killed == [2]
    assert [id for id, _ in engines.started] == [0, 1, 4, 3]


@pytest.mark.parametrize("kind", ["input", "lost"])
def test_what_the_input_is_at_fault_for_and_a_dead_keeper_are_failures_as_ever(run, kind):
    start(run, Described(["a"] * 4))
    say(run, "running")
    fail(run, 1, kind)
    record = RunRecord(run.paths.root)
    if kind == "lost":
        assert record.status()["state"] == "starting"
        info = read_json(run.paths.run)
        info["keeper"]["started"] -= 100
        run.paths.run.write_text(json.dumps(info))
    assert record.status()["state"] == "failed"


def test_the_state_of_a_run_that_another_lab_has_started_again_is_left_alone(run, tmp_path):
    folder = run.paths.checkpoints / "relayout-step-5"
    move = Move(3, "", folder.name, str(folder), "host", False, 5, run.paths.plan.read_text(), 4, 2, 0.0, 0, {})
    write_move(run.paths, move)
    info = read_json(run.paths.run)
    run.paths.run.write_text(json.dumps(info | {"generation": 2}))
    tidy(run)
    assert read_move(run.paths) == move
    run.paths.run.write_text(json.dumps(info))
    tidy(run)
    assert read_move(run.paths) is None


def test_a_run_whose_plan_is_damaged_fails_and_its_lab_goes_on(run):
    start(run, Described(["a"] * 4))
    say(run, "running")
    fail(run, 1)
    run.paths.plan.write_text("no = [toml")
    keeper = Keeper.__new__(Keeper)
    keeper._later = {}
    keeper.engines, keeper.log = Described(["a"] * 4), logging.getLogger("test")
    keeper._look_after(run)
    assert (run.state, run.again) == ("failed", None)
    assert "plan.toml" in RunRecord(run.paths.root).status()["reason"]


def test_a_paused_run_stays_paused(run):
    engines = Described(["a"] * 4)
    start(run, engines)
    say(run, "running", "paused")
    fail(run, 1)
    watch(run, engines)
    go_on(run)
    assert [command.verb for command in Inbox(run.paths.control).pending()] == ["pause"]


def test_what_cannot_be_replaced_is_done_without_until_it_is_back(tmp_path):
    run, engines = make(tmp_path, "cluster.elastic=true"), Described(["a"] * 4)
    start(run, engines)
    engines.gone.add(3)
    watch(run, engines)
    second = go_on(run)
    engines.problem = "there is no room"
    with pytest.raises(Lacking) as lacking:
        start(second, engines)
    assert (lacking.value.there, str(lacking.value)) == (3, "there is no room")
    full = Plan.load(run.paths.plan)
    assert shrink(second, 3, "there is no room")
    third = go_on(second)
    start(third, engines)
    assert (third.world, Plan.load(run.paths.plan).parallel.vision_dp) == (3, 1)
    assert Plan.load(run.paths.full_plan) == full
    assert "going on with 3 of 4 ranks: there is no room" in RunRecord(run.paths.root).status()["reason"]
    stepped(third, 1)
    watch(third, engines)
    (moved,) = events(run, "relayout")
    assert (moved["changes"], moved["before"], moved["after"]) == ({"parallel.vision_dp": [2, 1]}, 4, 3)
    assert not shrink(third, 2, "less still")
    engines.gone.discard(3)
    grow_back(third, engines, lambda: bool(Inbox(run.paths.control).pending()))
    (command,) = Inbox(run.paths.control).pending()
    assert (command.verb, command.args) == ("relayout", {"changes": {"parallel.vision_dp": 2}})


def test_a_first_start_waits_for_all_engines(tmp_path):
    engines = Described(["a"] * 3)
    engines.problem = "there is no room"
    with pytest.raises(LabError, match="there is no room") as error:
        start(make(tmp_path, "cluster.elastic=true"), engines)
    assert not isinstance(error.value, Lacking)


@pytest.fixture
def hanging(tmp_path, monkeypatch):
    """A run whose ranks have beacons, and a clock that a test turns."""
    run = make(tmp_path, "cluster.max_recoveries=2", "cluster.hang_timeout=10")
    engines = Described(["a"] * 4)
    start(run, engines)
    beacons = [Beacon(run.paths.ranks / f"rank-{r}.beacon", r, f"stage {r}", "elsewhere", 1) for r in range(4)]
    clock = [time.monotonic()]
    monkeypatch.setattr(watching, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(watching, "diagnose", lambda record: diagnose(record, seconds=0.05))

    def after(seconds):
        watch(run, engines)
        clock[0] += seconds
        watch(run, engines)
        return {failure.rank for failure in read_failures(run.paths.failures, 1) if failure.kind == "hung"}

    yield run, beacons, after
    for beacon in beacons:
        beacon.close()


def test_no_progress_of_any_rank_is_a_hang(hanging):
    run, beacons, after = hanging
    say(run, "running")
    stepped(run, 1)
    for beacon in beacons[1:] + beacons[:1]:
        beacon.update("forward")
    assert after(9) == set()
    beacons[2].update("reduce")
    assert after(9) == set()
    assert after(11) == {1}  # nobody is known to be waited for: the one that moved first and then no more
    assert run.again is None
    after(0)
    assert run.again is not None
    assert "nothing moved for" in run.again.reason


@pytest.mark.parametrize("phase", ["eval", "checkpoint", "start"])
def test_what_takes_long_by_nature_is_no_hang(hanging, phase):
    run, beacons, after = hanging
    say(run, "running")
    stepped(run, 1)
    for rank, beacon in enumerate(beacons):
        beacon.update(phase if rank == 1 else "reduce")
    assert after(95) == set()
    assert after(101) != set()


def test_a_first_step_and_a_pause_are_no_hang(hanging):
    run, beacons, after = hanging
    say(run, "running")
    for beacon in beacons:
        beacon.update("forward")
    assert after(95) == set()
    stepped(run, 1)
    say(run, "paused")
    assert after(1e6) == set()
    assert after(1e6) == set()


def test_what_was_set_since_the_newest_checkpoint_is_set_again(run):
    engines = Described(["a"] * 4)
    start(run, engines)
    (run.paths.checkpoints / "step-3").mkdir()
    manifest = {"name": "step-3", "step": 3, "time": 1, "lineage": ""}
    (run.paths.checkpoints / "step-3" / "manifest.json").write_text(json.dumps(manifest))
    log = EventLog(run.paths.events)
    for step, key, ok in ((2, "a", True), (3, "b", True), (4, "c", False), (5, "b", True)):
        log.emit("command", verb="set", args={"values": {key: step}}, ok=ok, step=step)
    log.close()
    fail(run, 1)
    watch(run, engines)
    (command,) = Inbox(run.paths.control).pending()
    assert (command.verb, command.args, command.source) == ("set", {"values": {"b": 5}}, "recovery")
