"""The command line trains for real: results, an interrupt, a killed rank, the demo."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mmlab.messages import RunPaths, read_beacons
from mmlab.plan import Plan
from mmlab.tracking.record import RunRecord, list_runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


class Started:
    """A command in a process of its own."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        environment = os.environ | {"MMLAB_RUNS": str(folder / "runs"), "JUPYTER_RUNTIME_DIR": str(folder / "runtime")}
        self.folder = folder
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mmlab.cli", *arguments],
            cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def end(self) -> tuple[int, str, str]:
        """Exit code, stdout, stderr, once it has ended."""
        out, err = self.process.communicate(timeout=400)
        assert "Traceback" not in out + err
        return self.process.returncode, out, err

    def run(self, step: int) -> Path:
        """The folder of the run, once it has done `step` steps."""
        end = time.monotonic() + 120
        while time.monotonic() < end:
            records = list_runs(self.folder / "runs")
            if records and records[0].status()["step"] >= step:
                return records[0].paths.root
            assert self.process.poll() is None, self.process.communicate()
            time.sleep(0.1)
        raise AssertionError(f"the run did not reach step {step}")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Started]]:
    """Starts commands, and ends those that a failed test leaves."""
    commands: list[Started] = []

    def run(*arguments: str) -> Started:
        commands.append(Started(tmp_path, *arguments))
        return commands[-1]

    yield run
    for command in commands:
        if command.process.poll() is None:
            command.process.kill()
            command.process.communicate()


def pids(run_dir: Path) -> list[int]:
    return [beacon.pid for beacon in read_beacons(RunPaths(run_dir).ranks)]


def gone(processes: list[int], seconds: float = 20.0) -> bool:
    end = time.monotonic() + seconds
    while any(psutil.pid_exists(pid) for pid in processes) and time.monotonic() < end:
        time.sleep(0.1)
    return not any(psutil.pid_exists(pid) for pid in processes)


def test_run_trains_and_writes_results_and_report(start: Callable[..., Started], tmp_path: Path) -> None:
    code, out, _ = start("run", "laptop", "train.steps=6", "train.eval_samples=16", "--json", "out.json").end()
    assert code == 0
    results: dict[str, Any] = json.loads((tmp_path / "out.json").read_text())
    assert results["world_size"] == 3
    assert results["state"] == "finished"
    assert len(results["losses"]) == 6
    assert results["losses"][-1] < results["losses"][0]
    assert results["held_out"]["loss_swapped"] > 0
    assert Plan.model_validate(results["plan"]).train.steps == 6
    report = Path(results["report"])
    assert str(report) in out.replace("\n", "")
    assert "as measured" in report.read_text() or "no step was traced" in report.read_text()
    assert gone(pids(Path(results["run"])))
    # no lab lives: it is started again in one of its own, here in another layout
    code, out, _ = start("restore", results["run"], "parallel.pp=1").end()
    assert code == 0
    assert "finished after 6 steps" in out
    assert len(RunRecord(Path(results["run"])).lineages()) == 2
    assert RunRecord(Path(results["run"])).plan.world_size == 2
    code, out, _ = start("branch", results["run"], "train.steps=8", "--step", "6").end()
    assert code == 0
    assert "finished after 2 steps" in out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_stops_the_run_at_a_step_and_leaves_no_process(
    start: Callable[..., Started], number: signal.Signals
) -> None:
    command = start("run", "laptop", "train.steps=5000")
    run_dir = command.run(step=3)
    processes = pids(run_dir)
    assert len(processes) == 3
    command.process.send_signal(number)
    code, _, err = command.end()
    assert code == 130
    assert "stopping the run" in err
    assert RunRecord(run_dir).status()["state"] == "stopped"
    assert gone(processes)


def test_a_killed_rank_is_exit_code_2_naming_rank_and_logs(start: Callable[..., Started], tmp_path: Path) -> None:
    command = start("run", "laptop", "train.steps=5000", "cluster.max_recoveries=0", "--json", "out.json")
    run_dir = command.run(step=3)
    processes = pids(run_dir)
    os.kill(processes[1], signal.SIGKILL)
    code, _, err = command.end()
    assert code == 2
    assert "rank 1 (stage 0 tp 0)" in err
    assert str(run_dir / "logs") in err.replace("\n", "")
    assert (run_dir / "report.html").is_file()
    results = json.loads((tmp_path / "out.json").read_text())
    assert results["state"] == "failed"
    assert "rank 1" in results["reason"]
    assert gone(processes)


def test_balance_measures_and_says_what_to_set(start: Callable[..., Started]) -> None:
    code, out, err = start("balance", "laptop", "data.path=shapes", "model.language.layers=5").end()
    assert code == 0, err
    assert {"block", "embedding", "head"} <= set(out.split())
    (line,) = [line for line in out.splitlines() if line.startswith("parallel.layers_per_stage=")]
    plan = Plan.load("laptop").with_("model.language.layers=5", line)
    assert list(plan.check()) == []


def test_verify_shows_that_the_plan_equals_one_process(start: Callable[..., Started], tmp_path: Path) -> None:
    code, out, _ = start("verify", "laptop", "--steps", "2", "--json", "v.json").end()
    assert code == 0
    results = json.loads((tmp_path / "v.json").read_text())
    assert results["ok"] is True
    assert max(results[f"max_rel_{what}"] for what in ("loss", "grad", "param")) <= 1e-9
    assert {"world_size", "losses", "plan", "seconds"} <= set(results)
    assert "within tolerance" in out


def test_the_demo_learns_and_its_images_matter(start: Callable[..., Started], tmp_path: Path) -> None:
    code, out, _ = start("demo", "--json", "out.json").end()
    assert code == 0
    results = json.loads((tmp_path / "out.json").read_text())
    assert results["world_size"] == 6
    assert results["loss_fall"] >= 0.4
    assert results["held_out"]["ratio"] >= 1.2
    report = Path(results["report"]).read_text()
    assert report.count("<img") == 8
    assert "as measured" in report
    assert "report:" in out
