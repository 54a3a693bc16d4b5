"""Where ranks are and how each is: what stands out, and why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ui.synthetic import SyntheticRun, playing

from mmlab.lab import Run
from mmlab.messages import PHASES
from mmlab.messages.failures import Failure, write_failure
from mmlab.plan import Plan
from mmlab.tracking.placement import Placement
from mmlab.tracking.record import RunRecord


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SyntheticRun]:
    with playing(tmp_path, steps=6) as made:
        yield made


def placed(run: SyntheticRun) -> Placement:
    return RunRecord(run.dir).placement()


def states(run: SyntheticRun) -> list[str]:
    return [rank.state for rank in placed(run).ranks]


def test_ranks_that_work_are_alive_and_say_what_they_do(run: SyntheticRun) -> None:
    found = placed(run)
    assert [rank.state for rank in found.ranks] == ["alive"] * 6
    assert found.attention == []
    assert found.hosts == [("here", [0, 1, 2, 3, 4, 5])]
    assert found.ranks[2].doing == "forward of step 6, microbatch 0"
    assert found.ranks[0].holds == "encoder 0-1, projector"
    assert {row.axis for row in found.traffic.rows} == {"tp", "pp", "tokens", "vision"}
    assert "| " not in str(found)
    assert "what it does" in str(found)
    assert "image tokens to the first stage" in found.html()


def test_before_any_rank_is_there_the_plans_nodes_are_shown(tmp_path: Path) -> None:
    run = SyntheticRun(tmp_path, Plan.preset("quickstart").with_("cluster.ranks_per_node=4"))
    found = placed(run)
    assert found.hosts == [("node 0", [0, 1, 2, 3]), ("node 1", [4, 5])]
    assert {rank.state for rank in found.ranks} == {"absent"}


def test_a_rank_whose_process_is_gone_is_dead(run: SyntheticRun) -> None:
    run.live_here(*range(6))
    run.kill(4)
    found = placed(run)
    assert [rank.rank for rank in found.attention] == [4]
    assert found.below == "rank 4 (stage 1 tp 0): dead, forward of step 6, microbatch 0"
    assert found.state == "failed"


def test_a_stopped_process_is_told_from_one_that_works(run: SyntheticRun) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        try:
            run._as(3, os.uname().nodename, process.pid)
            assert states(run)[3] == "alive"
            os.kill(process.pid, signal.SIGSTOP)
            end = time.monotonic() + 30
            while states(run)[3] != "stopped" and time.monotonic() < end:
                time.sleep(0.02)
            assert [rank.rank for rank in placed(run).attention] == [3]
        finally:
            process.kill()


def test_ranks_that_wait_and_the_one_they_wait_for(run: SyntheticRun) -> None:
    run.stall(14, {0: "exchange", 1: "exchange", 2: "pipeline", 3: "pipeline", 4: "forward", 5: "reduce"})
    assert states(run) == ["waiting", "waiting", "waiting", "waiting", "slow", "waiting"]
    assert placed(run).attention[0].rank == 4, "the one that others wait for comes first"
    assert placed(run).ranks[4].doing.endswith("microbatch 1, for 14 s")
    run.stall(14, dict.fromkeys(range(6), "forward"))
    assert states(run) == ["waiting"] * 6, "a collective within forward: nobody can be told to be the slow one"
    run.stall(14, dict.fromkeys(range(6), "eval"))
    assert states(run) == ["alive"] * 6, "an evaluation may take long"


def test_a_pause_is_no_wait(run: SyntheticRun) -> None:
    run.state("paused")
    run.stall(300, dict.fromkeys(range(6), "control"))
    assert states(run) == ["alive"] * 6


def test_a_rank_that_computes_longer_than_its_like_is_slow(run: SyntheticRun, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = run._phases

    def phases(place: Any, seconds: float) -> list[float]:
        row = usual(place, seconds)
        row[PHASES.index("encode")] *= 3 if place.rank == 1 else 1
        return row

    monkeypatch.setattr(run, "_phases", phases)
    run.train(20)
    assert states(run) == ["alive", "slow", "alive", "alive", "alive", "alive"]
    assert placed(run).ranks[1].why.startswith("it computes ")


def test_steps_behind_and_what_failed(run: SyntheticRun) -> None:
    run.beacons[3].step -= 2
    run.beacons[3].update("backward", 1)
    assert [rank.behind for rank in placed(run).ranks] == [0, 0, 0, 2, 0, 0]
    failure = Failure(2, "stage 0 tp 0", "backward", 6, "exception", "ValueError: no")
    write_failure(run.paths.failures, 0, failure)
    found = placed(run)
    assert (found.ranks[2].state, found.ranks[2].why) == ("failed", "failed in backward of step 6: ValueError: no")
    run.lose(5)
    assert [(rank.rank, rank.state) for rank in placed(run).attention] == [(5, "dead"), (2, "failed")]


def test_a_run_that_has_ended_has_no_one_to_worry_about(run: SyntheticRun) -> None:
    run.finish()
    assert set(states(run)) == {"left"}
    assert str(Run(run.dir).placement()) == str(placed(run))
