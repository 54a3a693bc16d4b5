"""The commands about DeepSpeed."""

import json
import re

import pytest

from mmlab.cli import run_command
from mmlab.plan import Plan, deepspeed

MERGED = ("parallel.vision=first_stage", "parallel.vision_dp=0", "parallel.pp=1", "parallel.dp=2")


def test_the_json_is_printed_with_comments_and_without(capsys):
    asked = (*MERGED, "parallel.sharding=zero3")
    wanted = deepspeed.config(Plan.load("laptop").with_(*asked))
    assert run_command(["deepspeed-config", "laptop", *asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == wanted
    assert run_command(["deepspeed-config", "laptop", *asked]) == 0
    text = capsys.readouterr().out
    assert json.loads(re.sub(r"  // .*", "", text)) == wanted
    assert "stays outside of DeepSpeed" in text


def test_what_deepspeed_cannot_do_is_said_with_a_fix(capsys):
    assert run_command(["deepspeed-config", "laptop"]) == 1
    error = capsys.readouterr().err
    assert "parallel.vision" in error
    assert "parallel.sharding=zero1" in error


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_offload_is_measured_and_trains_the_same(tmp_path, capsys):
    file = tmp_path / "offload.json"
    asked = (*MERGED, "parallel.sharding=zero2", "data.path=shapes", "data.held_out=")
    assert run_command(["bench", "offload", "laptop", *asked, "--steps", "2", "--json", str(file)]) == 0
    modes = json.loads(file.read_text())["modes"]
    assert [(m["mode"], m["sharding"]) for m in modes] == [
        ("none", "zero2"), ("optimizer", "zero2"), ("none", "zero3"), ("parameters", "zero3"), ("nvme", "zero3")
    ]  # fmt: skip
    assert "problem" in modes[-1]
    for mode in modes[:-1]:
        assert mode["losses"] == pytest.approx(modes[0]["losses"], rel=1e-5)
        assert mode["steps_per_s"] > 0
    assert modes[0]["off_device"] == modes[2]["off_device"] == 0
    assert modes[3]["off_device"] == modes[1]["off_device"] * 5 / 4  # the weights too
    shown = capsys.readouterr().out
    assert "MB" in shown
    assert "nvme not here: " in shown
    assert "try more --steps" in shown
