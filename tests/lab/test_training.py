"""The real worker on real engines: trains, loses a rank, and goes on from its checkpoint in the same lab."""

import io
import os
import signal
import tarfile

import pytest
from lab_helpers import assert_ended, eventually, processes
from PIL import Image

from mmlab import Plan, RunFailed
from mmlab.lab import Lab


@pytest.fixture(scope="module")
def shard(tmp_path_factory):
    """Twenty-four pictures with captions."""
    folder = tmp_path_factory.mktemp("shards")
    with tarfile.open(folder / "train-000000.tar", "w") as tar:
        for number in range(24):
            picture = io.BytesIO()
            Image.new("RGB", (20, 20), (number * 10, 100, 50)).save(picture, "PNG")
            for name, data in (("png", picture.getvalue()), ("txt", b"a picture of number %d" % number)):
                info = tarfile.TarInfo(f"s{number:03d}.{name}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return folder


@pytest.fixture
def real_lab(place, tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))
    lab = Lab(engines=2)
    yield lab
    pids = processes(lab)
    lab.close()
    assert_ended(pids)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_train_lose_a_rank_and_restore(real_lab, shard):
    changes = {"data.path": str(shard), "data.held_out": "", "train.steps": 100000, "data.lanes": 2}
    changes["cluster.max_recoveries"] = 0
    run = real_lab.train(Plan.preset("laptop").with_("parallel.pp=1", changes))
    run.wait(step=2, timeout=100)
    ack = run.checkpoint().wait()
    assert ack.ranks == [0, 1]
    run.wait(step=ack.step + 2, timeout=60)
    victim = run.status()["ranks"][1]
    survivor = run.status()["ranks"][0]["pid"]
    keeper = real_lab.info()["keeper"]["pid"]
    os.kill(keeper, signal.SIGSTOP)  # a loss is seen by who asks, before anybody has written of it
    os.kill(victim["pid"], signal.SIGKILL)
    try:
        reason = eventually(lambda: (s := run.status())["state"] == "failed" and s["reason"])
    finally:
        os.kill(keeper, signal.SIGCONT)
    assert reason.startswith(f"rank 1 ({victim['role']}) failed in ")
    with pytest.raises(RunFailed, match="its process ended; logs are in"):
        run.wait(timeout=60)
    run.restore()  # in the same lab, with the surviving engine and a new one
    run.wait(step=ack.step + 1, timeout=100)
    status = run.status()
    assert (status["state"], status["generation"]) == ("running", 2)
    assert status["ranks"][0]["pid"] == survivor or status["ranks"][1]["pid"] == survivor
    steps = [row["step"] for row in run.metrics()]  # read once: it goes on meanwhile
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= status["step"]
    _abort_and_go_on(real_lab, run)


def _abort_and_go_on(lab, run):
    """Engines and what cells have put into them outlive an abort; the same engines train again."""
    lab.view.push({"kept": [7]}, block=True)
    engines = [rank["pid"] for rank in run.status()["ranks"]]
    assert "run.abort" not in run.doctor().text.splitlines()[0]
    assert run.abort().wait(30).message.startswith("rank ")
    assert run.status()["state"] == "stopped"
    assert run.status()["reason"].startswith("aborted (api); rank ")
    assert run.doctor().text.endswith("no rank of it is at work")
    run.restore()
    step = run.status()["step"]
    run.wait(step=step + 2, timeout=100)
    assert [rank["pid"] for rank in run.status()["ranks"]] == engines
    assert lab.view.pull("kept", block=True) == [[7]] * 2
    stopped = run.stop()
    run.wait(timeout=60)
    assert stopped.ack.ok
    assert "Traceback" in run.log(0)
