"""The same worker under torchrun, without ipyparallel."""

import os
import subprocess
import sys

import pytest

from mmlab.tracking.record import list_runs

pytestmark = pytest.mark.slow


def torchrun(processes, folder, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "-m", "mmlab.train"]
    environment = os.environ | {"MMLAB_RUNS": str(folder), "OMP_NUM_THREADS": "1"}
    return subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, timeout=110)


def test_a_run_is_recorded_like_any_other(shards, tmp_path):
    ended = torchrun(3, tmp_path, "laptop", f"data.path={shards}", "train.steps=3")
    assert ended.returncode == 0, ended.stderr
    (record,) = list_runs(tmp_path)
    assert str(record.paths.root) in ended.stdout
    assert "step 3  loss" in ended.stdout
    assert ended.stdout.rstrip().endswith("finished")
    status = record.status()
    assert (status["state"], status["step"], status["steps"]) == ("finished", 3, 3)
    assert len(record.metrics()) == 3
    assert [c["step"] for c in record.checkpoints()] == [3]


def test_input_at_fault_is_one_sentence_and_leaves_no_run(shards, tmp_path):
    few = torchrun(2, tmp_path, "laptop", f"data.path={shards}")
    assert few.returncode != 0
    assert "the plan needs 3 ranks and torchrun started 2; use --nproc-per-node 3" in few.stderr
    assert not list_runs(tmp_path)


def test_missing_shards_are_the_inputs_fault(tmp_path):
    ended = torchrun(3, tmp_path, "laptop", f"data.path={tmp_path / 'nowhere'}")
    assert "exitcode  : 1" in ended.stderr  # of the ranks; torchrun's own is always 1
    (record,) = list_runs(tmp_path)
    assert "nowhere" in record.status()["reason"]
    assert "nowhere" in record.log(0)
