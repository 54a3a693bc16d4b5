"""`mmlab bench link`: which rank is on which host, what is refused, what it measures, and that nothing outlives it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import psutil
import pytest
from two_hosts import possible

from mmlab.cli import run_command
from mmlab.cli.bench import few_steps
from mmlab.cluster import netns
from mmlab.cluster.link import (
    PATIENCE,
    STEPS,
    bench_link,
    cases,
    expected,
    refuse_unmeasured,
    refuse_useless,
    split,
    time_limit,
)
from mmlab.cluster.netns import Shape
from mmlab.errors import MmlabError
from mmlab.plan import Plan
from mmlab.plan.sizes import rank_share
from mmlab.train.bench import LEAST, WARM_UP

LAPTOP = Plan.preset("laptop").with_("parallel.pp=1")
MERGED = ("parallel.vision=first_stage", "parallel.vision_dp=0", "parallel.pp=1")
TINY = (*MERGED, "parallel.dp=2", "data.path=shapes", "data.held_out=")


def hosts(*changes):
    return split(LAPTOP.with_(*changes).layout())


def test_replicas_are_apart_and_what_computes_a_sample_is_together():
    # an encoder, then the grid, stage-major
    assert hosts("parallel.dp=2") == [0, 0, 1]
    assert hosts("parallel.dp=2", "parallel.vision_dp=2") == [0, 1, 0, 1]
    assert hosts("parallel.dp=3", "parallel.vision_dp=3") == [0, 0, 1, 0, 0, 1]
    assert hosts(*MERGED, "parallel.dp=2", "parallel.tp=2") == [0, 0, 1, 1]
    assert hosts(*MERGED, "parallel.dp=2", "parallel.cp=2") == [0, 0, 1, 1]
    assert hosts(*MERGED, "parallel.dp=2", "parallel.pp=2") == [0, 1, 0, 1]  # both stages of a replica on its host


def test_nodes_of_the_plan_are_kept_together():
    # stage-major: the first node has both replicas of the first stage
    assert hosts(*MERGED, "parallel.dp=2", "parallel.pp=2", "cluster.ranks_per_node=2") == [0, 0, 1, 1]
    assert hosts(*MERGED, "parallel.dp=4", "cluster.ranks_per_node=1") == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ((*MERGED, "parallel.dp=1"), "one rank"),
        (("parallel.dp=1",), "one replica a module"),
        ((*MERGED, "parallel.dp=1", "parallel.tp=2"), "one replica a module"),
        (
            ("parallel.dp=1", "parallel.vision_dp=2", "train.vision.frozen=true", "train.projector.frozen=true"),
            "one re",
        ),
        ((*MERGED, "parallel.dp=2", "parallel.pp=2", "cluster.ranks_per_node=2"), "ranks_per_node"),
    ],
)
def test_a_plan_that_reduces_nothing_between_the_hosts_is_refused_with_a_fix(changes, reason):
    plan = LAPTOP.with_(*changes)
    with pytest.raises(MmlabError, match=reason) as caught:
        refuse_useless(plan, split(plan.layout()))
    assert "parallel.dp=2" in str(caught.value)
    fixed = plan.with_("parallel.dp=2", "cluster.ranks_per_node=0")
    refuse_useless(fixed, split(fixed.layout()))


def test_cases_are_changes_to_the_plan_with_dense_first():
    found = dict(cases(LAPTOP.with_("parallel.dp=2"), ["int8", "powersgd:2", "none", "int8"]))
    assert list(found) == ["none", "int8", "powersgd:2"]
    assert all(plan.cluster.collectives == "gloo" for plan in found.values())
    communication = found["powersgd:2"].communication
    assert (communication.language.compressor, communication.language.rank) == ("powersgd", 2)
    assert communication.vision.compressor == "none"  # one encoder has nobody to reduce with
    for name in ("zip", "int8:3", "topk:much"):
        with pytest.raises(MmlabError):
            cases(LAPTOP.with_("parallel.dp=2"), [name])


def test_compressors_are_measured_from_the_first_step_and_by_themselves():
    asked = (
        "communication.measure_every=2",
        "communication.vision.warmup_steps=9",
        "communication.language.warmup_steps=9",
    )
    for name, plan in cases(LAPTOP.with_("parallel.dp=2", "parallel.vision_dp=2", *asked), ["int8"]):
        communication = plan.communication
        assert communication.measure_every == 0
        assert communication.vision.at(1).compressor == communication.language.at(1).compressor == name


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (("parallel.sharding=zero2",), "zero2 sums gradients inside backward"),
        (("parallel.sharding=zero3",), "zero3 sums gradients inside backward"),
        (("parallel.engine=deepspeed", "parallel.sharding=zero2", "offload.mode=optimizer"), "DeepSpeed sums"),
        (("train.optimizer=onebit_adam", "train.clip_norm=0"), "up to step 20"),
    ],
)
def test_a_plan_whose_exchange_cannot_be_told_apart_is_refused_with_a_fix(changes, reason):
    plan = Plan.preset("laptop").with_(*TINY, *changes)
    plan.check().raise_if_any()
    with pytest.raises(MmlabError, match=reason) as caught:
        refuse_unmeasured(plan)
    fixed = plan.with_(*re.findall(r"\S+=\w+", str(caught.value)))
    fixed.check().raise_if_any()
    refuse_unmeasured(fixed)


def test_a_slow_link_is_given_the_time_of_its_bits():
    assert STEPS == WARM_UP + LEAST
    plan = LAPTOP.with_("parallel.dp=2", "parallel.vision_dp=2")
    layout = plan.layout()
    dense = 4 * rank_share(plan, layout, layout.places[-1]).trained  # with two replicas a host sends them once
    slow, other = Shape(1e5), 1e6
    needed = STEPS * expected(0.0, dense + other, slow)
    assert needed > 6 * PATIENCE
    assert time_limit(plan, split(layout), 20.0, other, slow) > 20.0 + PATIENCE + needed


def test_few_steps_are_said_to_be_few():
    rows = [{"compressor": "none", "seconds": [2.0] * 4}, {"compressor": "int8", "seconds": [0.5] * 10}]
    assert "none (4)" in few_steps([*rows, {"compressor": "onebit", "problem": "..."}])
    assert "int8" not in few_steps(rows)
    assert few_steps(rows[1:]) == ""
    assert "zero2, offload none (6)" in few_steps([{"mode": "none", "sharding": "zero2", "seconds": [1.0] * 6}])


def test_a_step_by_bytes_alone():
    assert expected(0.1, 12.5e6, Shape(1e8)) == pytest.approx(1.1)


def test_the_command_refuses_in_one_line(capsys, monkeypatch):
    command = ["bench", "link", "laptop", *TINY]
    assert run_command([*command, "--rate", "quick"]) == 1
    assert "such as 100mbit" in capsys.readouterr().err
    assert run_command([*command, "--compressors", "zip"]) == 1
    assert "not a compressor" in capsys.readouterr().err
    assert run_command([*command, "parallel.dp=1"]) == 1
    assert "one rank" in capsys.readouterr().err
    assert run_command([*command, "parallel.sharding=zero2"]) == 1
    assert "zero2" in capsys.readouterr().err
    assert run_command([*command, "--seconds", "inf"]) == 1
    assert "number of seconds" in capsys.readouterr().err
    with pytest.raises(MmlabError, match="number of seconds"):
        bench_link(LAPTOP, Shape(1e8), [], float("nan"))
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert run_command(command) == 1
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "need root" in error


@possible
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_compressors_are_measured_beside_dense(tmp_path, capsys):
    file = tmp_path / "link.json"
    asked = ["--rate", "200mbit", "--seconds", "1", "--compressors", "bf16,powersgd:2", "--json", str(file)]
    assert run_command(["bench", "link", "laptop", *TINY, "parallel.sharding=none", *asked]) == 0
    found = json.loads(file.read_text())
    assert found["hosts"] == [0, 1]
    assert found["alone"] > 0
    dense, half, factors = found["rows"]
    assert [row["compressor"] for row in found["rows"]] == ["none", "bf16", "powersgd:2"]
    assert half["handed"] == pytest.approx(dense["handed"] / 2, rel=1e-3)
    for row in found["rows"]:
        assert row["sent"] >= row["handed"]  # two ranks hand over what each of their hosts sends, without headers
        assert row["equal_steps"][0] == dense["equal_steps"][0]
    assert dense["sent"] < 1.15 * dense["handed"]
    assert half["equal_steps"][1] == pytest.approx(dense["equal_steps"][1], rel=0.05)
    assert dense["predicted"] == dense["ratio"] == 1.0 < half["predicted"] < factors["predicted"]
    assert "powersgd:2" in capsys.readouterr().out
    assert of(os.getpid()) == []


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the kernel's count of sent bytes is Linux's")
def test_weights_that_zero1_gathers_are_not_gradients_handed_over(pool):
    """And a step without summing gradients hands none over."""
    whole = LAPTOP.with_(*TINY)

    def handed(plan, exchange):
        found = pool.run("mmlab.train.bench:run_for", plan.dumps(), 0.0, "lo", exchange, ranks=2, timeout=90)
        return [result["handed"] for result in found]

    assert handed(whole.with_("parallel.sharding=zero1"), True) == handed(whole, True) != [0.0, 0.0]
    assert handed(whole.with_("parallel.sharding=zero1"), False) == [0.0, 0.0]


def of(pid):
    return [path.name for path in netns.NAMESPACES.iterdir() if path.name.startswith(f"mmlab-{pid}-")]


@possible
@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGHUP])
def test_nothing_outlives_a_call_that_is_killed(how, tmp_path):
    """SIGKILL leaves no time to clean up; SIGHUP, to all processes of the terminal, is its terminal gone."""
    heard = ["env", "--default-signal=HUP"]  # whoever started the tests may have let them ignore it, as nohup does
    command = [*heard, sys.executable, "-m", "mmlab.cli", "bench", "link", "laptop", *TINY, "--seconds", "100"]
    with open(tmp_path / "output", "wb") as output:
        call = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
    try:
        ranks = []
        while len(ranks) < 2:
            assert call.poll() is None, (tmp_path / "output").read_text()
            time.sleep(0.2)
            ranks = [pid for name in of(call.pid) for pid in netns._pids(name)] if netns.NAMESPACES.is_dir() else []
        if how == signal.SIGKILL:
            call.kill()
        else:
            os.killpg(call.pid, how)
        call.wait(60)
        end = time.monotonic() + 30
        while (of(call.pid) or any(psutil.pid_exists(pid) for pid in ranks)) and time.monotonic() < end:
            time.sleep(0.1)
        assert of(call.pid) == []
        assert not any(psutil.pid_exists(pid) for pid in ranks)
    finally:
        if call.poll() is None:
            call.kill()
            call.wait(10)
