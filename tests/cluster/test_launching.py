"""Choosing engines for a run, with engines that are only described."""

import functools
import itertools
import logging
import math
import shutil
import threading
from types import SimpleNamespace

import pytest
from ipyparallel.error import RemoteError

from mmlab.cluster import client, keeper
from mmlab.cluster.client import LabView
from mmlab.cluster.engine_info import EngineInfo, EngineLost
from mmlab.cluster.engines import Engines
from mmlab.cluster.keeper import Keeper
from mmlab.cluster.launching import ActiveRun, Stopped, choose, launch, take_over
from mmlab.cluster.watching import watch
from mmlab.errors import LabError
from mmlab.messages import EventLog, Failure, new_command, read_ack, read_json, send, write_failure
from mmlab.messages.events import read_events
from mmlab.messages.moves import NotRescued
from mmlab.messages.runs import create_run


class Described:
    """Engines that answer what they are told to."""

    batch = True
    connected = True
    problem = ""

    def __init__(self, hosts, busy=(), blind=(), spot=()):
        self.engines = [EngineInfo(id, 100 + id, 1.0, host, False) for id, host in enumerate(hosts)]
        self.busy, self.blind, self.spot = set(busy), set(blind), set(spot)
        self.config = SimpleNamespace(worker="w", start_timeout=180.0)
        self.asked, self.gone, self.started, self.killed = 0, set(), [], []

    def ensure(self, n):
        self.asked = n

    def up(self):
        return [engine for engine in self.engines if engine.id not in self.gone]

    def lost(self, engine):
        return engine.id in self.gone

    def kill(self, engine):
        self.killed.append(engine.id)
        self.gone.add(engine.id)

    def call(self, team, method, arguments, timeout):
        if method == "state":
            return [{"busy": e.id in self.busy, "sees": e.host not in self.blind} for e in team]
        if method == "expendable":
            return [engine.host in self.spot for engine in team]
        if method == "open_store":
            return [("10.0.0.1", 1234)]
        if method == "warmed":
            return [True] * len(team)
        assert method == "start"
        self.started = [(engine.id, job) for engine, (job, _) in zip(team, arguments, strict=True)]
        return [None] * len(team)


@pytest.fixture
def run(tmp_path):
    paths = create_run(tmp_path, "x", "cluster.max_recoveries = 0", world_size=4, steps=10)
    return take_over({"run_dir": str(paths.root), "generation": 1, "restore": "step-5", "time": 0.0})


def start(run, engines):
    launch(run, engines, lambda: True, lambda: False)


def test_neighbouring_ranks_share_hosts_and_every_rank_has_its_job(run):
    engines = Described(["a", "b", "a", "b", "c"])
    start(run, engines)
    assert [engine for engine, _ in engines.started] == [0, 2, 1, 3]
    assert [(job["rank"], job["restore"], job["store_port"]) for _, job in engines.started] == [
        (rank, "step-5", 1234) for rank in range(4)
    ]
    info = read_json(run.paths.run)
    assert (info["engines"], info["hosts"]) == ([0, 2, 1, 3], ["a", "a", "b", "b"])
    assert engines.asked == 4


def test_hosts_that_do_not_see_the_folder_are_named(run):
    with pytest.raises(LabError, match=r"b, c cannot see the run's folder .*MMLAB_RUNS"):
        start(run, Described(["a", "b", "c", "c"], blind=["b", "c"]))


def test_engines_that_cannot_be_had_are_no_endless_wait(run):
    engines = Described(["a"])
    engines.problem = "sbatch was not found"
    with pytest.raises(LabError, match="sbatch was not found"):
        start(run, engines)


def test_a_stop_that_waits_ends_the_waiting(run):
    command = new_command("stop")
    send(run.paths.control, command)
    with pytest.raises(Stopped):
        start(run, Described(["a"]))
    assert read_ack(run.paths.control, command.id).ok


def test_commands_for_a_generation_that_has_ended_are_refused(run):
    old = new_command("pause")
    send(run.paths.control, old)
    take_over({"run_dir": str(run.paths.root), "generation": 2, "restore": None, "time": old.time + 1})
    assert read_ack(run.paths.control, old.id).message == "the run had ended"
    assert read_json(run.paths.run)["generation"] == 2


def test_an_engine_that_left_is_written_down_and_reported_if_no_rank_does(run):
    engines = Described(["a"] * 4)
    start(run, engines)
    engines.gone.add(2)
    watch(run, engines)
    record = read_json(run.paths.failures / "generation-1" / "rank-2.json")
    assert (record["kind"], record["message"]) == ("lost", "its process (pid 102 on a) ended")
    assert not run.ended  # a surviving rank has a second
    run.noticed -= 10
    watch(run, engines)
    run.read()
    assert run.state == "failed"


def test_what_a_rank_reports_is_not_repeated(run):
    engines = Described(["a"] * 4)
    start(run, engines)
    write_failure(run.paths.failures, 1, Failure(1, "stage 0", "forward", 3, "exception", "x"))
    log = EventLog(run.paths.events)
    log.emit("state", state="failed", step=3, reason="x")
    log.close()
    run.noticed = 1.0
    before = run.paths.events.read_text()
    watch(run, engines)
    assert run.ended
    assert run.paths.events.read_text() == before


def test_a_generation_that_has_ended_is_not_revived_by_the_next(run):
    engines = Described(["a"] * 4)
    start(run, engines)
    write_failure(run.paths.failures, 1, Failure(1, "stage 0", "forward", 3, "exception", "x"))
    log = EventLog(run.paths.events)
    for state in ("failed", "queued"):
        log.emit("state", state=state, step=3, reason="x")
    log.close()
    run.noticed = 1.0
    before = run.paths.events.read_text()
    watch(run, engines)
    watch(run, engines)
    assert run.state == "failed"
    assert run.paths.events.read_text() == before


def test_a_run_whose_folder_was_deleted_is_over(run):
    engines = Described(["a", "a"])
    run.engines = engines.up()
    run.state = "running"
    shutil.rmtree(run.paths.root)
    watch(run, engines)
    assert run.ended


def test_anchors_get_engines_on_lasting_hosts(run):
    run.cluster = run.cluster.model_copy(update={"anchors": (0, 3)})
    engines = Described(["spot", "spot", "kept", "spot", "kept"], spot={"spot"})
    start(run, engines)
    chosen = {job["rank"]: engine for engine, job in engines.started}
    assert {chosen[0], chosen[3]} == {2, 4}
    assert {chosen[1], chosen[2]} <= {0, 1, 3}
    few = Described(["spot", "spot", "kept", "spot"], spot={"spot"})
    with pytest.raises(LabError, match=r"names 2 ranks .* but 1 of 4 engines are on others \(spot may be taken away"):
        start(run, few)


def test_an_engine_that_the_controller_no_longer_knows_is_lost():
    engines = Engines.__new__(Engines)
    engines._client, engines._controller = [], None
    with pytest.raises(EngineLost, match=r"engine 0 .* ended before state"):
        engines.call([EngineInfo(0, 1, 1.0, "a", False)], "state", [()], 1.0)


def test_the_view_has_engines_in_rank_order_and_none_that_has_ended():
    view = LabView()
    view._client = SimpleNamespace(ids=[0, 1, 2], direct_view=list)
    view._file = ("p/security/ipcontroller-c-client.json", 0)
    info = {"profile_dir": "p", "cluster_id": "c", "up": [{"engine": 0}], "gone": [1]}
    assert view.of(info, [2, 0]) == [2, 0]  # 2 is so new that the keeper has yet to write of it
    assert view.of(info, [2, 1, 0]) == [0]


def test_the_view_waits_once_for_an_engine_that_the_controller_has_not_told_of(monkeypatch):
    now = itertools.count()
    monkeypatch.setattr(client, "time", SimpleNamespace(monotonic=lambda: next(now), sleep=lambda _: slept.append(1)))
    view, slept = LabView(), []
    view._client = SimpleNamespace(ids=[0], direct_view=list)
    view._file = ("p/security/ipcontroller-c-client.json", 0)
    info = {"profile_dir": "p", "cluster_id": "c", "up": [{"engine": 0}, {"engine": 1}]}
    assert view.of(info, [0]) == [0]  # the others of the lab are not asked for
    assert slept == []
    assert view.of(info, []) == [0]
    assert slept
    slept.clear()
    assert view.of(info, [0, 1]) == [0]
    assert slept == []


def test_what_each_engine_fails_with_is_the_labs_problem_and_an_end_is_not():
    answers = {0: RemoteError("ImportError", "no module", "", {}), 1: RemoteError("EngineError", "died", "", {})}

    def result(identity):
        def get(_):
            raise answers[identity]

        return SimpleNamespace(ready=lambda: True, get=get), 0.0

    engines = Engines.__new__(Engines)
    engines._up, engines.gone, engines._expected = [], set(), [1.0, 2.0]
    engines._greeted = {1: result(1)}
    engines._greet(SimpleNamespace(ids=[1]))
    assert (engines.gone, engines._expected) == ({1}, [2.0])
    engines._greeted = {0: result(0)}
    with pytest.raises(RemoteError, match="ImportError"):
        engines._greet(SimpleNamespace(ids=[0, 1]))
    assert (engines.gone, engines._expected) == ({1}, [2.0])


def test_engines_that_are_about_to_be_taken_away_keep_no_rank_from_an_anchor(run):
    up = Described(["a", "b", "a", "b"]).up()
    team = choose(up, 3, [up[0], up[1], up[2]], anchors=(2, 0), lasting=[up[0], up[1]])
    assert [engine.id for engine in team] == [0, 3, 1]


def test_how_a_run_that_waits_ends_with_its_lab_is_said_by_the_lab_alone(tmp_path, monkeypatch):
    run = ActiveRun(create_run(tmp_path, "waits", "", 2, 5), 1, None, 2)
    lab = SimpleNamespace(engines=None, _idle=None, closing=threading.Event(), _ending=threading.Lock())
    lab._not_started = functools.partial(Keeper._not_started, lab)

    def stopped(*_):
        raise Stopped

    monkeypatch.setattr(keeper, "launch", stopped)
    lab.closing.set()
    Keeper._start(lab, run)
    assert run.state == "queued"
    lab.closing.clear()
    Keeper._start(lab, run)
    assert run.state == "stopped"


def test_a_state_that_no_disk_takes_is_said_once_and_tried_at_intervals(tmp_path, monkeypatch):
    run = ActiveRun(create_run(tmp_path, "full", "", 2, 5), 1, None, 2, state="stopped")
    lab, tries = SimpleNamespace(_later={}, log=logging.getLogger("keeper")), []

    def full(run):
        tries.append(run)
        raise NotRescued("no space left on device")

    monkeypatch.setattr(keeper, "tidy", full)
    for _ in range(3):
        Keeper._look_after(lab, run)
    assert len(tries) == 1
    lab._later[run.paths.root] = 0.0
    Keeper._look_after(lab, run)
    assert len(tries) == 2
    warnings = [event["message"] for event in read_events(run.paths.events)[0] if event["kind"] == "warning"]
    assert warnings == ["no space left on device; it is tried again every 10 s until there is room, or the lab ends"]
    monkeypatch.setattr(keeper, "tidy", tries.append)
    lab._later[run.paths.root] = 0.0
    Keeper._look_after(lab, run)
    assert (len(tries), lab._later) == (3, {})
    lab._later, lab.runs, lab._pending, lab._wake = {run.paths.root: math.inf}, [run], [], threading.Condition()
    Keeper._queue(lab, run)
    assert lab._later == {}  # a generation that was begun since is not to wait
