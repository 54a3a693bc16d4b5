"""The command line: output, files and exit codes of every command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ui.synthetic import SyntheticRun

from mmlab.cli import run_command
from mmlab.cli.progress import follow_run
from mmlab.cli.training import results_of
from mmlab.errors import LabError
from mmlab.lab import Run
from mmlab.lessons import NOTEBOOKS, place_notebooks
from mmlab.plan import Plan, preset_names
from mmlab.tracking.record import RunRecord

BROKEN = sorted((Path(__file__).parent / "plans" / "broken").glob("*.toml"))
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Command:
    """Runs a command in this process, in a folder of its own: exit code, stdout, stderr."""
    monkeypatch.setenv("MMLAB_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        code = run_command(list(arguments))
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return run


@pytest.fixture
def run(command: Command, tmp_path: Path) -> Iterator[SyntheticRun]:
    """A live synthetic run in the runs' folder, five steps in."""
    made = SyntheticRun(tmp_path / "runs")
    made.start()
    made.train(5)
    yield made
    made.close()


@pytest.fixture
def answering(run: SyntheticRun) -> Iterator[None]:
    """A second thread that answers the run's inbox as rank 0 does."""
    end = threading.Event()

    def answer() -> None:
        while not end.wait(0.02):
            run.answer()

    thread = threading.Thread(target=answer)
    thread.start()
    yield
    end.set()
    thread.join()


def applied(run: SyntheticRun) -> list[tuple[str, dict[str, Any]]]:
    """Verbs and arguments of the commands in the event log."""
    return [(event["verb"], event["args"]) for event in RunRecord(run.dir).events() if event["kind"] == "command"]


def test_help_lists_all_commands_without_loading_what_computes(command: Command) -> None:
    code, out, _ = command("--help")
    assert code == 0
    verbs = "pause resume step set compress compression checkpoint restore stop doctor abort placement measured"
    for name in f"demo run new check layout balance verify data runs show {verbs} lab labs grow close".split():
        assert f" {name} " in out
    script = "import sys, mmlab.cli; mmlab.cli.build_app(); print(*(m for m in sys.modules if '.' not in m))"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert {"torch", "ipyparallel", "IPython", "anywidget", "numpy", "PIL"}.isdisjoint(loaded)


@pytest.mark.parametrize("preset", preset_names())
def test_new_prints_a_plan_that_loads_as_the_preset(command: Command, tmp_path: Path, preset: str) -> None:
    code, out, _ = command("new", preset)
    assert code == 0
    (tmp_path / "plan.toml").write_text(out)
    assert Plan.load(tmp_path / "plan.toml") == Plan.preset(preset)


@pytest.mark.parametrize("preset", preset_names())
def test_presets_check_and_show_their_layout(command: Command, preset: str) -> None:
    code, out, _ = command("check", preset)
    assert code == 0
    assert f"needs {Plan.preset(preset).world_size} ranks" in out
    code, out, _ = command("layout", preset)
    assert code == 0
    assert "stage 1" in out
    assert "bubble" in out


@pytest.mark.parametrize("path", BROKEN, ids=lambda path: path.stem)
def test_broken_plans_are_refused_with_field_and_message(command: Command, path: Path) -> None:
    for name in ("check", "run", "layout", "verify"):
        code, out, err = command(name, str(path))
        assert code == 1
        assert "PlanError" in err
        assert len(out + err) > 60
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("check", "missing.toml"), "no plan file missing.toml"),
        (("check", "quickstar"), "presets: quickstart, laptop"),
        (("new", "nothing"), "presets: quickstart, laptop"),
        (("check", "quickstart", "parallel.pt=2"), "unknown key parallel.pt; the nearest known one is parallel."),
        (("check", "quickstart", "parallel.tp=two"), "parallel.tp"),
        (("check", "quickstart", "parallel.tp"), "parallel.tp"),
        (("run", "quickstart", "--json", "file/out.json"), "--json file/out.json: cannot be written"),
        (("demo", "--json", "file/out.json"), "--json file/out.json: cannot be written"),
        (("verify", "quickstart", "--json", "file/out.json"), "--json file/out.json: cannot be written"),
        (("data", "make", "photos"), "emoji, shapes"),
        (("data", "make", "shapes", "file/shapes"), "file"),
        (("show", "nothing"), "`mmlab runs` lists them"),
        (("pause", "nothing"), "`mmlab runs` lists them"),
        (("show", "last"), "`mmlab runs` lists them"),
        (("close",), "--all"),
        (("close", "nothing"), "no lab nothing"),
        (("grow", "nothing", "3"), "no lab nothing"),
        (("lab", "file/work"), "cannot be written"),
    ],
)
def test_the_users_errors_are_one_message_and_exit_code_1(
    command: Command, tmp_path: Path, arguments: tuple[str, ...], says: str
) -> None:
    (tmp_path / "file").write_text("a file, no folder")
    code, _, err = command(*arguments)
    assert code == 1
    assert says in err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("arguments", [("chekc",), ("check",), ("step", "x", "none"), ("demo", "--steps", "0")])
def test_wrong_usage_is_exit_code_1_since_2_is_a_failed_run(command: Command, arguments: tuple[str, ...]) -> None:
    assert command(*arguments)[0] == 1


def test_unwritable_run_folder_is_named(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MMLAB_RUNS", str(tmp_path / "file" / "runs"))
    code, _, err = command("run", "laptop")
    assert code == 1
    assert str(tmp_path / "file" / "runs") in err
    assert "MMLAB_RUNS" in err


@pytest.mark.parametrize(
    ("arguments", "verb", "args"),
    [
        (("pause",), "pause", {}),
        (("resume",), "resume", {}),
        (("step", "3"), "step", {"n": 3}),
        (("set", "train.steps=77", "train.language.lr=1e-4"), "set",
         {"values": {"train.steps": 77, "train.language.lr": 1e-4}}),
        (("compress", "language", "none", "residual=drop"), "set",
         {"values": {"communication.language.compressor": "none", "communication.language.residual": "drop"}}),
        (("checkpoint",), "checkpoint", {}),
        (("checkpoint", "good"), "checkpoint", {"name": "good"}),
        (("stop",), "stop", {}),
        (("abort",), "abort", {"generation": 0}),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("answering")
def test_verbs_steer_a_live_run(
    command: Command, run: SyntheticRun, arguments: tuple[str, ...], verb: str, args: dict[str, Any]
) -> None:
    code, out, _ = command(arguments[0], "last", *arguments[1:])
    assert code == 0
    assert f"{arguments[0]}: applied after step 5 on 6 ranks" in out
    assert applied(run) == [(verb, args)]


@pytest.mark.usefixtures("answering")
def test_set_refuses_what_cannot_change_and_what_is_no_pair(command: Command, run: SyntheticRun) -> None:
    code, _, err = command("set", "last", "parallel.tp=2")
    assert code == 1
    assert "train.language.lr" in err
    code, _, err = command("set", "last", "train.language.lr")
    assert code == 1
    assert "KEY=VALUE" in err
    assert applied(run) == []


def test_compress_refuses_what_no_compressor_has(command: Command, run: SyntheticRun) -> None:
    for words, says in (
        (("text", "topk"), "vision, language or all"),
        (("all", "topkk"), "the nearest known one is topk"),
        (("all", "topk", "rank=4"), "topk has no option rank; it has ratio"),
        (("all", "topk", "ratio=2"), "communication.vision.ratio = 2: must be a number, above 0, at most 1"),
        (("all", "topk", "ratio"), "KEY=VALUE"),
        (("all", "topk", "group=1"), "topk has no option group"),
    ):
        code, _, err = command("compress", "last", *words)
        assert code == 1
        assert says in err
        assert len(err.strip().splitlines()) == 1
    assert not list(run.paths.control.glob("*.json"))


def test_compression_shows_what_was_counted(command: Command, run: SyntheticRun) -> None:
    code, out, _ = command("compression", "last")
    assert code == 0
    assert "powersgd" in out
    assert max(map(len, out.splitlines())) <= 80
    assert "18 x" in out
    assert "gradient norm of vision / language" in out


def test_placement_and_measured_say_what_the_run_says(command: Command, run: SyntheticRun) -> None:
    code, _, err = command("measured", "last")
    assert (code, "has no trace of a step" in err) == (1, True)
    run.train(2)
    run.trace()
    code, out, _ = command("measured", "last", "--step", str(run.step))
    assert (code, out) == (0, f"{Run(run.dir).measured()}\n")
    code, out, _ = command("placement", "last")
    assert code == 0
    assert "stage 1 tp 1" in out


def test_doctor_says_what_each_rank_does(command: Command, run: SyntheticRun) -> None:
    code, out, _ = command("doctor", "last")
    assert code == 0
    assert f"run {run.dir.name}: running" in out
    run.finish()
    code, out, _ = command("doctor", "last")
    assert code == 0
    assert "no rank of it is at work" in out


def test_an_ended_run_is_not_steered(command: Command, run: SyntheticRun) -> None:
    run.finish()
    code, _, err = command("pause", "last")
    assert code == 1
    assert "has ended" in err
    code, _, err = command("restore", "last")
    assert code == 1
    assert "no checkpoint" in err


def test_runs_and_show_tell_state_step_and_loss(command: Command, run: SyntheticRun) -> None:
    code, out, _ = command("runs")
    assert code == 0
    assert run.dir.name in out
    assert "running" in out
    assert "5 / 120" in out
    for name in ("last", run.dir.name, run.dir.name[:14], str(run.dir)):
        code, out, _ = command("show", name)
        assert code == 0
        assert "running, step 5 of 120" in out


def test_a_start_of_a_name_that_fits_several_runs_lists_them(
    command: Command, run: SyntheticRun, tmp_path: Path
) -> None:
    other = SyntheticRun(tmp_path / "runs", name="other")
    code, _, err = command("show", run.dir.name[:4])
    assert code == 1
    assert run.dir.name in err
    assert other.dir.name in err


def test_without_runs_and_labs_it_says_so(command: Command) -> None:
    assert "no runs" in command("runs")[1]
    assert "no live labs" in command("labs")[1]
    assert command("close", "--all")[0] == 0


def test_a_run_is_followed_to_its_end(run: SyntheticRun, capfd: pytest.CaptureFixture[str]) -> None:
    thread = threading.Thread(target=lambda: (run.train(40), run.evaluate(), run.finish()))
    thread.start()
    feed = follow_run(run.dir)
    thread.join()
    lines = capfd.readouterr().out.splitlines()
    assert feed.state == "finished"
    assert lines[-1] == "finished"
    assert any("loss" in line and "tokens/s" in line and "images/s" in line for line in lines)
    assert len(lines) < 30


def test_results_hold_what_the_design_names(run: SyntheticRun) -> None:
    run.train(115)
    run.evaluate()
    run.finish()
    results = results_of(follow_run(run.dir), seconds=12.5)
    assert json.loads(json.dumps(results)) == results
    assert results["world_size"] == 6
    assert len(results["losses"]) == 120
    assert results["seconds"] == 12.5
    assert results["held_out"]["ratio"] == pytest.approx(1.4)
    assert 0.5 < results["loss_fall"] < 0.9
    assert Plan.model_validate(results["plan"]) == run.plan


def test_the_notebooks_are_copied_once(tmp_path: Path) -> None:
    path = place_notebooks(tmp_path / "work")
    assert path.name == NOTEBOOKS[0] == "01_quickstart.ipynb"
    assert {file.name for file in path.parent.iterdir()} == set(NOTEBOOKS)
    assert json.loads(path.read_text())["nbformat"] == 4
    path.write_text("my own changes")
    assert place_notebooks(tmp_path / "work").read_text() == "my own changes"
    (tmp_path / "file").write_text("")
    with pytest.raises(LabError, match="writable"):
        place_notebooks(tmp_path / "file" / "work")


def test_a_closed_pipe_is_no_error(run: SyntheticRun) -> None:
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run(
        [sys.executable, "-m", "mmlab.cli", "show", str(run.dir)],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert process.stderr == ""


def test_checkpoints_are_listed_named_and_deleted(command: Command, run: SyntheticRun, tmp_path: Path) -> None:
    code, out, _ = command("checkpoints", "last")
    assert (code, out) == (0, "no checkpoint yet\n")
    run.checkpoint()
    run.train(1)
    run.checkpoint("best", periodic=False, reason="command")
    code, out, _ = command("checkpoints", "last", "--json", str(tmp_path / "tree.json"))
    assert code == 0
    assert "lineage a: the start" in out
    assert "step-000005-a" in out
    names = [node.get("name") for node in json.loads((tmp_path / "tree.json").read_text())["nodes"]]
    assert names == [None, "step-000005-a", "best"]
    code, out, _ = command("rename-checkpoint", "last", "step-000005-a", "early")
    assert (code, out) == (0, "checkpoint step-000005-a of step 5 is now early, and kept\n")
    code, _, err = command("rename-checkpoint", "last", "early", "a/b")
    assert (code, "is not a name" in err) == (1, True)
    code, _, err = command("delete-checkpoint", "last", "best")
    assert (code, "with force" in err) == (1, True)
    code, out, _ = command("delete-checkpoint", "last", "best", "--force")
    assert (code, "deleted checkpoint best of step 6" in out) == (0, True)
    code, _, err = command("compare", "last", "early", "9")
    assert (code, "no checkpoint at step 9" in err) == (1, True)
    code, _, err = command("branch", "last", "model.language.hidden=96", "--name", "early")
    assert (code, "the weights would be another model's" in err) == (1, True)
