"""`%load_ext mmlab`: words of the command line, and cells on live ranks, on real engines from a real kernel."""

import sys
import time
from types import SimpleNamespace

import pytest
from IPython.core.interactiveshell import InteractiveShell
from lab_helpers import assert_ended, eventually, processes
from test_kernel import Kernel
from ui.stage import Stage, browser_page
from ui.synthetic import SyntheticRun

from mmlab import Plan
from mmlab.cluster.asking import CellFailed, ask, engines_of, parse_ranks
from mmlab.cluster.cells import BEGAN, names_of, offered
from mmlab.errors import CheckpointError, LabError, MmlabError
from mmlab.lab import Lab, Run
from mmlab.magics import LabMagics, between, overview, say, show, takes_run
from mmlab.messages import ENDED
from mmlab.tracking.sent import Sent


@pytest.fixture
def magics(place, tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("MMLAB_RUNS", str(tmp_path / "runs"))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # a shell puts a module of its own there
    return LabMagics(InteractiveShell())


def test_ranks_are_read_as_written():
    assert parse_ranks("") is None
    assert parse_ranks("all") is None
    assert parse_ranks("2") == [2]
    assert parse_ranks("0-2, 5,1") == [0, 1, 2, 5]
    with pytest.raises(LabError, match="more than 100,000 ranks"):
        parse_ranks("0-999999999")
    for bad in ("x", "2-1", "1,", "-1", "1.5"):
        with pytest.raises(LabError, match="names no ranks"):
            parse_ranks(bad)
    assert engines_of([4, 7], None) == {0: 4, 1: 7}
    with pytest.raises(LabError, match="there is no rank 2; there are 2"):
        engines_of([4, 7], [2])


def test_a_cell_leaves_nothing_of_a_generation_behind():
    session, own = object(), object()
    namespace = {"model": "mine", "kept": 1}
    with offered(namespace, {"model": session, "plan": session, "rank": 3}):
        assert namespace == {"model": session, "plan": session, "rank": 3, "kept": 1}
        namespace["plan"] = own
    assert namespace == {"model": "mine", "kept": 1, "plan": own}
    assert names_of(None) == {}


def test_commands_know_whether_they_take_a_run():
    assert all(takes_run(word) for word in ("show", "pause", "resume", "step", "set", "checkpoint", "restore", "stop"))
    assert all(takes_run(word) for word in ("abort", "doctor", "diagnose", "relayout", "compress", "traffic"))
    assert not any(takes_run(word) for word in ("runs", "labs", "check", "nothing"))
    words = overview()
    assert "  status " in words
    assert "  pause " in words
    assert "%%ranks --help" in words


def test_errors_are_one_message_and_help_costs_nothing(magics, capsys):
    for line, message in (
        ("run quickstart", r"would hold this cell until its end; in a notebook there is lab.train\(plan\)"),
        ("pause", "no run yet in "),
        ("--lab", "--lab takes a name"),
        ("'", "No closing quotation"),
        ("frob", "%mmlab frob did not succeed"),
    ):
        with pytest.raises(MmlabError, match=message):
            magics.mmlab(line)
    with pytest.raises(MmlabError, match="no lab lives"):
        magics.ranks("", "1")
    capsys.readouterr()
    for text in ("--help", "pause --help", "status --help"):
        magics.mmlab(text)
        assert "mmlab" in capsys.readouterr().out
    magics.rank("--help", "1")
    assert "the rank, such as 2" in capsys.readouterr().out
    magics.ranks("-h", "1")
    assert "--between" in capsys.readouterr().out
    magics.mmlab("status")
    assert "no live labs\nno run yet in " in capsys.readouterr().out
    magics.mmlab("runs")
    assert "no runs in" in capsys.readouterr().out


def test_an_interrupt_while_the_run_is_to_pause_lets_it_go_on(magics, tmp_path, monkeypatch):
    made = SyntheticRun(tmp_path)
    made.start()
    made.train(1)

    def interrupted(sent):
        raise KeyboardInterrupt

    monkeypatch.setattr(Sent, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt), between(Run(made.dir)):
        pytest.fail("the cell must not run")
    assert made.answer() == ["pause", "resume"]
    made.close()


def test_a_rank_that_does_not_begin_is_given_up_once(capsys):
    """While another one's cell goes on."""
    ends = time.monotonic() + 0.5
    aborted = []

    def result(engine):
        said = "" if engine else BEGAN
        outputs = {"stdout": said, "stderr": "", "outputs": []}
        return SimpleNamespace(
            ready=lambda: not engine and time.monotonic() > ends, wait_for_output=lambda seconds: True,
            get=lambda timeout: {"data": None}, metadata=outputs, msg_ids=[engine],
        )  # fmt: skip

    client = SimpleNamespace(
        ids=[0, 1], direct_view=lambda engine: SimpleNamespace(apply_async=lambda *_: result(engine)),
        abort=lambda ids, **_: aborted.append(ids),
    )  # fmt: skip
    with pytest.raises(CellFailed, match=r"^rank 1: does not answer"):
        ask(SimpleNamespace(client=client), {0: 0, 1: 1}, "1", {}, say, show, timeout=0.1)
    assert aborted == [[1]]


@pytest.fixture(scope="module")
def trained(place, tmp_path_factory):
    """A kernel with the extension, and a run of three ranks on engines of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path_factory.mktemp("magics")))
        lab = Lab(engines=3)
        kernel, pids = None, {}
        try:
            kernel = Kernel()
            loaded = kernel.run("%load_ext mmlab")
            assert loaded["error"] == []
            run = _begun(lab)
            pids = processes(lab)
            yield kernel, lab, run
        finally:
            if kernel is not None:
                kernel.close()
            lab.close()
            assert_ended(pids)


def _begun(lab):
    return lab.train(Plan.preset("laptop").with_("train.steps=100000")).wait(step=2, timeout=150, progress=False)


@pytest.fixture
def at_work(trained):
    """The kernel, the lab and the run; another run where a test that failed has ended that one."""
    kernel, lab, run = trained
    return kernel, lab, run if run.status()["state"] not in ENDED else _begun(lab)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_cells_on_live_ranks(at_work):
    kernel, _, run = at_work
    shown = kernel.run("%%ranks\nprint('at', role)\nsum(p.numel() for p in model.parameters()) > 1000")
    assert shown["error"] == []
    assert sorted(shown["text"].splitlines()) == [
        "[0] True", "[0] at vision 0", "[1] True", "[1] at stage 0 tp 0", "[2] True", "[2] at stage 1 tp 0",
    ]  # fmt: skip
    early = kernel.run("%%rank 1\nimport time\nprint('early')\ntime.sleep(30)", until="[1] early")
    assert early["error"] == ["interrupted the cell on rank 1; the run goes on"]
    step = run.status()["step"]
    run.wait(step=step + 2, timeout=60, progress=False)
    assert run.status()["state"] == "running"
    assert kernel.run("%%rank 1\nkept = rank\n'model' in dir()")["text"] == "[1] True\n"
    failed = kernel.run("%%ranks 0-1\nkept + 1")
    assert failed["text"] == "[1] 2\n"
    assert failed["error"] == ["rank 0: NameError: name 'kept' is not defined\n  cell line 1: kept + 1"]
    assert (
        kernel.run("%%rank 0\nfrom IPython.display import HTML, display\ndisplay(HTML('<b>7</b>'))")["html"]
        == "<b>7</b>"
    )
    steps = kernel.run("%%ranks --between\nstep")["text"].splitlines()
    assert len({line.split()[1] for line in steps}) == 1
    eventually(lambda: run.status()["state"] == "running")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_busy_engines_and_words_of_the_command_line(at_work, tmp_path):
    kernel, lab, run = at_work
    asleep, awake = tmp_path / "asleep", tmp_path / "awake"
    sleep = f"open({str(asleep)!r}, 'w').close()\nwhile not os.path.exists({str(awake)!r}): time.sleep(0.1)"
    client = lab.view.client
    sleeping = client.direct_view(lab.view.targets[2]).execute(f"import os, time\n{sleep}", block=False)
    eventually(asleep.exists)  # a client's first message can come later than a cell of the kernel
    busy = kernel.run("%%ranks --timeout 5\nrank")
    assert not sleeping.ready()
    awake.touch()
    assert sorted(busy["text"].split("\n")) == ["", "[0] 0", "[1] 1"]
    assert busy["error"][0].startswith("rank 2: does not answer")
    assert "applied after step" in kernel.run("%mmlab pause")["text"]
    assert run.status()["state"] == "paused"
    assert "set: applied after step" in kernel.run("%mmlab set train.language.lr=2e-4")["text"]
    assert "paused, step" in kernel.run("%mmlab status")["text"]
    assert "step: applied" in kernel.run("%mmlab --run last step 2")["text"]
    eventually(lambda: run.status()["state"] == "paused")
    refused = kernel.run("%mmlab relayout data.seed=4")
    assert refused["error"] == ["%mmlab relayout did not succeed (exit code 1); its message is above"]
    assert "a run that goes on keeps its model" in refused["text"]
    assert "checkpoint: applied" in kernel.run("%mmlab checkpoint 7")["text"]
    assert "stop: " in kernel.run(f"%mmlab stop {run.id}")["text"]
    run.wait(timeout=60, progress=False)
    eventually(lambda: kernel.run("%%rank 0\nrank, 'model' in dir()")["text"] == "[0] (0, False)\n")  # it has left
    assert run.compare("7", str(run.status()["step"])).modules, "digits: a name, else a step"
    with pytest.raises(CheckpointError, match=r"comparing was not done after 0\.01 s"):
        run.compare("7", "7", timeout=0.01)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_form_of_a_plan_trains_in_the_lab(trained):
    """The button, in a page, on engines that are there."""
    _, lab, run = trained
    form = Plan.preset("laptop").with_("train.eval_samples=0", "checkpoint.at_end=false").form(lab)
    with browser_page() as page:
        stage = Stage(page, form)
        stage.until(lambda: page.locator(".mm-form-picture svg").count() == 2)
        page.get_by_label("train.steps", exact=True).fill("100000")
        page.get_by_role("button", name="Train", exact=True).click()
        stage.until(lambda: "training as run" in page.locator(".mm-said").inner_text())
        assert form.run.id != run.id
        assert form.run.id in page.locator(".mm-said").inner_text()
        page.get_by_role("button", name="Train", exact=True).click()
        stage.until(lambda: page.locator(".mm-said.mm-bad").count())  # the lab is busy with it
        assert form.run.id in page.locator(".mm-said").inner_text()
        assert stage.errors == []
    form.close()
    form.run.wait(step=2, timeout=120, progress=False)
    form.run.stop()
    form.run.wait(timeout=60, progress=False)
    assert (form.run.status()["state"], form.run.plan.train.steps) == ("stopped", 100_000)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_cell_comes_back_though_no_lab_lives(trained):
    """Where `mmlab restore` in a terminal follows the run to its end."""
    kernel, lab, run = trained
    if run.status()["state"] not in ENDED:
        run.stop()
        run.wait(timeout=60, progress=False)
    lab.close()
    of, name = f"%mmlab --run {run.id}", run.checkpoints()[-1]["name"]
    for line, other in (
        (f"{of} restore --name {name} parallel.microbatches=4,", False),
        (f"{of} branch --name {name}", True),
    ):
        text = kernel.run(line)["text"]
        assert "goes on meanwhile" in text
        [own] = Lab.live()
        assert f"it starts in lab {own.id} " in text
        assert (f"{run.dir}\n" not in text) == other
        eventually(lambda own=own: own.info().get("keeper"))
        pids = processes(own)
        own.close()
        assert_ended(pids)
